//! Texts of the host, for the program's log and its terminal.
#![forbid(unsafe_code)]

/// The first `limit` bytes of a text, in whole characters, without those that move a cursor, end a line or turn its direction.
pub(crate) fn plain(text: &str, limit: usize) -> String {
    let mut plain: String = text.chars().filter(|c| !c.is_control() && !turns(*c)).collect();
    let end = (0..=plain.len().min(limit)).rev().find(|at| plain.is_char_boundary(*at));
    plain.truncate(end.unwrap_or(0));
    plain
}

/// Whether a character turns the direction of a line or separates lines.
fn turns(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn t20_what_a_host_writes_is_one_plain_line_of_bounded_length() {
        assert_eq!(plain("\x1b[31ma\r\n\u{9b}b\u{202e}c\u{2028}%s\0é", 99), "[31mabc%sé");
        assert_eq!(plain(&"é".repeat(9), 5), "éé");
        assert_eq!(plain("", 5), "");
    }
}
