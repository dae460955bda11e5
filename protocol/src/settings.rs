//! How settings write numbers of bytes, for every part that reads some from its environment.

/// What a number of bytes looks like, for a message.
pub const SIZE_FORM: &str = "a number of bytes such as 21474836480 or 20G (K, M, G and T are powers of 1024)";

/// Environment variable: the log lines a second that all guests of a server or a VMM cause together.
pub const MAX_LOG_LINES: &str = "APIR_MAX_LOG_LINES";
/// Its value when it is unset.
pub const DEFAULT_LOG_LINES: u64 = 10;

/// Bytes from a setting's text: digits, and `K`, `M`, `G` or `T` in either case for a power of 1024.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    let shift = match text.as_bytes().last()? {
        b'k' | b'K' => 10,
        b'm' | b'M' => 20,
        b'g' | b'G' => 30,
        b't' | b'T' => 40,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    // The library's parser takes a sign.
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t31_sizes_take_suffixes_and_nothing_else() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("20G", 20 << 30),
            ("20g", 20 << 30),
            ("3K", 3072),
            ("512M", 512 << 20),
            ("1T", 1 << 40),
            ("16777215T", 16_777_215 << 40),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
        }
        for text in
            ["", "G", "-1", "+1", "1.5G", "20GB", "20 G", " 1", "1é", "16777216T", "18446744073709551616"]
        {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
