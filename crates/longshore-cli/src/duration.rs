//! Durations as people write them: `500ms`, `10s`, `5m`, `2h`, `1d`, `1h30m`.
//! The one place that reads and the one that writes them.

use std::time::Duration;

/// The units, largest first: the order in which they are written.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Reads a duration. A bare number is refused, because seconds and
/// milliseconds are both plausible.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let refused = || {
        format!(
            "`{text}` is not a duration; write a number and a unit (ms, s, m, h, d), like 500ms, 10s or 1h30m"
        )
    };
    let mut millis = 0u64;
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(refused());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(refused)?;
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let number: u64 = number.parse().map_err(|_| refused())?;
        let (_, size) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refused)?;
        millis = number
            .checked_mul(*size)
            .and_then(|part| millis.checked_add(part))
            .ok_or_else(|| format!("`{text}` is longer than any clock; write a shorter duration"))?;
        rest = tail;
    }
    Ok(Duration::from_millis(millis))
}

/// Reads a duration or the word `none`.
pub(crate) fn parse_or_none(text: &str) -> Result<Option<Duration>, String> {
    match text {
        "none" => Ok(None),
        _ => parse(text).map(Some).map_err(|error| format!("{error}; or none")),
    }
}

/// Writes what the API tells in seconds.
pub(crate) fn show_seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| seconds.to_string(), show)
}

/// Writes a duration so that [`parse`] reads it back, to the millisecond.
pub(crate) fn show(duration: Duration) -> String {
    let mut left = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if left == 0 {
        return "0s".into();
    }
    let mut shown = String::new();
    for (name, size) in UNITS {
        if left >= size {
            shown.push_str(&format!("{}{name}", left / size));
            left %= size;
        }
    }
    shown
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_read_and_parts_add_up() {
        let cases = [
            ("0s", 0),
            ("500ms", 500),
            ("10s", 10_000),
            ("5m", 300_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
        ];
        for (text, millis) in cases {
            assert_eq!(parse(text).unwrap(), Duration::from_millis(millis), "{text}");
        }
        assert_eq!(parse("1h30m").unwrap(), Duration::from_secs(5400));
        assert_eq!(parse(" 7s ").unwrap(), Duration::from_secs(7));
    }

    #[test]
    fn what_is_no_duration_is_refused_with_the_right_form() {
        for text in
            ["", " ", "10", "s", "-5s", "1.5h", "5 m", "3w", "5M", "1h30", "99999999999999999999s", "١s"]
        {
            assert!(
                parse(text).unwrap_err().contains("is not a duration; write a number and a unit"),
                "{text}"
            );
        }
        assert!(parse("18446744073709551615d").unwrap_err().contains("longer than any clock"));
    }

    #[test]
    fn none_is_a_word_of_its_own() {
        assert_eq!(parse_or_none("none").unwrap(), None);
        assert_eq!(parse_or_none("2h").unwrap(), Some(Duration::from_secs(7200)));
        assert!(parse_or_none("never").unwrap_err().ends_with("; or none"));
    }

    #[test]
    fn what_is_shown_is_read_back() {
        for text in ["0s", "1ms", "59s999ms", "1m", "1h30m", "400d23h59m59s"] {
            assert_eq!(show(parse(text).unwrap()), text);
            assert_eq!(show_seconds(parse(text).unwrap().as_secs_f64()), text);
        }
    }
}
