//! Parses and formats durations as people write them: `500ms`, `10s`, `5m`, `2h`, `1d`,
//! `1h30m`.

use std::time::Duration;

/// The units in the order in which they are written, largest first.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// Parses a duration. A bare number is rejected, because it could mean seconds or
/// milliseconds.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let invalid = || {
        format!(
            "`{text}` is not a duration; write a number and a unit (ms, s, m, h, d), like 500ms, 10s or 1h30m"
        )
    };
    let mut millis = 0u64;
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(invalid());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(invalid)?;
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let number: u64 = number.parse().map_err(|_| invalid())?;
        let (_, size) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(invalid)?;
        millis = number
            .checked_mul(*size)
            .and_then(|part| millis.checked_add(part))
            .ok_or_else(|| format!("`{text}` is too long; write a shorter duration"))?;
        rest = tail;
    }
    Ok(Duration::from_millis(millis))
}

/// Parses a duration or `none`.
pub(crate) fn parse_or_none(text: &str) -> Result<Option<Duration>, String> {
    match text {
        "none" => Ok(None),
        _ => parse(text).map(Some).map_err(|error| format!("{error}; or none")),
    }
}

/// Formats a number of seconds, as the API returns it.
pub(crate) fn show_seconds(seconds: f64) -> String {
    Duration::try_from_secs_f64(seconds).map_or_else(|_| seconds.to_string(), show)
}

/// Formats a duration to the millisecond, in a form that [`parse`] accepts.
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
    fn every_unit_is_parsed_and_parts_are_added() {
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
    fn invalid_durations_are_rejected_with_an_example() {
        for text in
            ["", " ", "10", "s", "-5s", "1.5h", "5 m", "3w", "5M", "1h30", "99999999999999999999s", "١s"]
        {
            assert!(
                parse(text).unwrap_err().contains("is not a duration; write a number and a unit"),
                "{text}"
            );
        }
        assert!(parse("18446744073709551615d").unwrap_err().contains("is too long"));
    }

    #[test]
    fn none_is_accepted_where_a_limit_is_optional() {
        assert_eq!(parse_or_none("none").unwrap(), None);
        assert_eq!(parse_or_none("2h").unwrap(), Some(Duration::from_secs(7200)));
        assert!(parse_or_none("never").unwrap_err().ends_with("; or none"));
    }

    #[test]
    fn formatted_durations_parse_to_the_same_value() {
        for text in ["0s", "1ms", "59s999ms", "1m", "1h30m", "400d23h59m59s"] {
            assert_eq!(show(parse(text).unwrap()), text);
            assert_eq!(show_seconds(parse(text).unwrap().as_secs_f64()), text);
        }
    }
}
