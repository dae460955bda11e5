//! What CPU kernels can do with each element type.
#![forbid(unsafe_code)]

/// 32-bit float.
pub const F32: u32 = 0;
/// 16-bit float.
pub const F16: u32 = 1;
/// 8-bit blocks that CPU kernels multiply most types with.
pub const Q8_0: u32 = 8;
/// As Q8_0, with the sum of each block.
pub const Q8_1: u32 = 9;
/// As Q8_0, in blocks of 256.
pub const Q8_K: u32 = 15;
/// 8-bit integer.
pub const I8: u32 = 24;
/// 16-bit integer.
pub const I16: u32 = 25;
/// 32-bit integer.
pub const I32: u32 = 26;
/// 64-bit integer.
pub const I64: u32 = 27;
/// 64-bit float.
pub const F64: u32 = 28;
/// 16-bit float with the range of the 32-bit one.
pub const BF16: u32 = 30;

/// F32, F16, BF16.
#[must_use]
pub fn is_float(type_: u32) -> bool {
    matches!(type_, F32 | F16 | BF16)
}

/// A block type that has a way to floats; Q8_1 and Q8_K have none.
#[must_use]
pub fn is_readable_block(type_: u32) -> bool {
    matches!(type_, 2 | 3 | 6..=8 | 10..=14 | 16..=23 | 29 | 34 | 35 | 39..=42)
}

/// A block type that floats can be turned into, and back.
#[must_use]
pub fn is_writable_block(type_: u32) -> bool {
    is_readable_block(type_) && !matches!(type_, 16..=19 | 21 | 22 | 29)
}

/// The type that CPU kernels multiply a row of this type with; none when they have no such product.
#[must_use]
pub fn dot_type(type_: u32) -> Option<u32> {
    Some(match type_ {
        F32 => F32,
        F16 => F16,
        BF16 => BF16,
        2 | 6 | Q8_0 | 20 | 39..=42 => Q8_0,
        3 | 7 => Q8_1,
        10..=14 | 16..=19 | 21..=23 | 29 | 34 | 35 => Q8_K,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use apir_ggml::TypeInfo;

    #[test]
    fn classes_speak_of_types_that_are() {
        for number in 0..64 {
            let info = TypeInfo::get(number);
            let block = info.is_some_and(TypeInfo::is_block);
            if is_readable_block(number) || is_writable_block(number) {
                assert!(block, "{number}");
            }
            if let Some(dot) = dot_type(number) {
                let (info, dot) = (info.unwrap(), TypeInfo::get(dot).unwrap());
                // A row that fills blocks of the type fills blocks of what it is multiplied with.
                assert_eq!(info.block % dot.block, 0, "{number}");
            }
        }
        let names = |class: fn(u32) -> bool| {
            TypeInfo::all().iter().filter(|info| class(info.number)).map(|info| info.name).collect::<Vec<_>>()
        };
        assert_eq!(names(is_readable_block).len(), 25);
        assert_eq!(names(is_writable_block).len(), 18);
        let no_product: Vec<_> = TypeInfo::all()
            .iter()
            .filter(|info| dot_type(info.number).is_none())
            .map(|info| info.name)
            .collect();
        assert_eq!(no_product, ["q8_1", "q8_K", "i8", "i16", "i32", "i64", "f64"]);
    }
}
