//! Inputs that are values: stored in a compact form, made from any bytes, and changed one part at a time.
#![forbid(unsafe_code)]

use crate::mutate::{ToBytes, spread};
use arbitrary::{Arbitrary, Unstructured};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A value that inputs of a target stand for.
pub trait Input: Serialize + DeserializeOwned + for<'a> Arbitrary<'a> {
    /// Changes a part of it.
    fn change(&mut self, u: &mut Unstructured<'_>);

    /// The value of an input: what it stores, else what its bytes make.
    #[must_use]
    fn of(bytes: &[u8]) -> Option<Self> {
        let stored = postcard::take_from_bytes(bytes).ok().filter(|(_, rest)| rest.is_empty());
        stored.map(|(value, _)| value).or_else(|| Self::arbitrary(&mut Unstructured::new(bytes)).ok())
    }

    /// The bytes that store it.
    #[must_use]
    fn store(&self) -> Vec<u8> {
        // Values here have no part that the form cannot hold.
        postcard::to_allocvec(self).unwrap_or_default()
    }
}

/// A step of libFuzzer over stored values; as [`crate::mutate::blob`].
pub fn mutate<I: Input>(
    data: &mut [u8],
    (size, max_size): (usize, usize),
    seed: u32,
    to_bytes: ToBytes,
) -> usize {
    let value = I::of(&data[..size]).filter(|_| !seed.is_multiple_of(8));
    let Some(mut value) = value else {
        return to_bytes(data, size, max_size);
    };
    let mut numbers = Vec::new();
    spread(seed, &mut numbers);
    value.change(&mut Unstructured::new(&numbers));
    let bytes = value.store();
    if bytes.len() > max_size {
        return size;
    }
    data[..bytes.len()].copy_from_slice(&bytes);
    bytes.len()
}

/// Changes a list: an element more, one less, two swapped, or a change by `each` to one of them.
pub fn change_list<T: Clone + for<'a> Arbitrary<'a>>(
    list: &mut Vec<T>,
    u: &mut Unstructured<'_>,
    each: impl Fn(&mut T, &mut Unstructured<'_>),
) {
    let len = list.len();
    let mut at = |count: usize| u.int_in_range(0..=count.max(1) - 1).unwrap_or_default();
    let (kind, from, to) = (at(8), at(len), at(len + 1));
    match kind {
        0 | 1 => {
            if let Ok(new) = T::arbitrary(u) {
                list.insert(to, new);
            }
        }
        2 if len > 0 => {
            list.remove(from);
        }
        3 if len > 0 => list.swap(from, to.min(len - 1)),
        4 if len > 0 => list.insert(to, list[from].clone()),
        _ if len > 0 => each(&mut list[from], u),
        _ => {}
    }
}
