//! Handles: `generation:32 | index:32` tokens of one context.
#![forbid(unsafe_code)]

use std::hash::{BuildHasher, RandomState};

/// Values that a guest names by token. A token of a freed value, of another table or of a guess finds nothing.
#[derive(Debug)]
pub struct HandleTable<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    first_generation: u32,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Default for HandleTable<T> {
    fn default() -> Self {
        // A start of its own for each table, so that the token of one context means nothing in another.
        let random = RandomState::new().hash_one(0u8) as u32;
        Self { slots: Vec::new(), free: Vec::new(), first_generation: random.max(1) }
    }
}

const fn token(generation: u32, index: u32) -> u64 {
    (generation as u64) << 32 | index as u64
}

/// The generation after this one; never 0, so that no token is 0.
const fn next(generation: u32) -> u32 {
    match generation.checked_add(1) {
        Some(next) => next,
        None => 1,
    }
}

impl<T> HandleTable<T> {
    /// Keeps a value and gives its token, never 0; gives the value back when 2^32 are kept already.
    pub fn insert(&mut self, value: T) -> Result<u64, T> {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            slot.value = Some(value);
            return Ok(token(slot.generation, index));
        }
        let Ok(index) = u32::try_from(self.slots.len()) else {
            return Err(value);
        };
        self.slots.push(Slot { generation: self.first_generation, value: Some(value) });
        Ok(token(self.first_generation, index))
    }

    /// The value of a token.
    #[must_use]
    pub fn get(&self, token: u64) -> Option<&T> {
        let slot = self.slots.get(token as u32 as usize)?;
        if slot.generation == (token >> 32) as u32 { slot.value.as_ref() } else { None }
    }

    /// Takes the value of a token out; the token is dead from then on.
    pub fn remove(&mut self, token: u64) -> Option<T> {
        self.get(token)?;
        let index = token as u32;
        let slot = &mut self.slots[index as usize];
        slot.generation = next(slot.generation);
        self.free.push(index);
        slot.value.take()
    }

    /// How many values are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether nothing is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn stale_null_and_foreign_tokens_find_nothing() {
        let mut table = HandleTable::default();
        let first = table.insert("a").unwrap();
        assert_ne!(first, 0);
        assert_eq!(table.get(0), None);
        assert_eq!(table.remove(first), Some("a"));
        let second = table.insert("b").unwrap();
        assert_eq!(second as u32, first as u32, "the slot is used again");
        assert_ne!(second, first);
        assert_eq!(table.get(first), None);
        assert_eq!(table.remove(first), None);
        assert_eq!(table.get(second), Some(&"b"));
        assert_eq!(table.get(second ^ 1), None);
        assert_eq!(table.get(second ^ 1 << 63), None);
        let mut other =
            HandleTable { first_generation: table.first_generation ^ 0x5555, ..HandleTable::default() };
        other.insert("c").unwrap();
        assert_eq!(other.get(second), None);
    }

    #[test]
    fn generations_pass_their_end_without_a_null_token() {
        let mut table = HandleTable { first_generation: u32::MAX, ..HandleTable::default() };
        let last = table.insert(1).unwrap();
        table.remove(last);
        let first = table.insert(2).unwrap();
        assert_eq!(first, token(1, 0));
        assert_eq!(table.get(last), None);
    }

    proptest! {
        #[test]
        fn behaves_as_a_map(steps in prop::collection::vec((any::<bool>(), any::<usize>()), 1..200)) {
            let mut table = HandleTable::default();
            let mut model = HashMap::new();
            let mut dead = Vec::new();
            for (value, (insert, pick)) in steps.into_iter().enumerate() {
                if insert || model.is_empty() {
                    let token = table.insert(value).unwrap();
                    prop_assert!(token != 0 && !dead.contains(&token));
                    prop_assert_eq!(model.insert(token, value), None);
                } else {
                    let token = *model.keys().nth(pick % model.len()).unwrap();
                    prop_assert_eq!(table.remove(token), model.remove(&token));
                    dead.push(token);
                }
                prop_assert_eq!(table.len(), model.len());
                prop_assert!(model.iter().all(|(token, value)| table.get(*token) == Some(value)));
                prop_assert!(dead.iter().all(|token| table.get(*token).is_none()));
            }
        }
    }
}
