//! Numbers, times and durations as people read them.

use std::time::Duration;

use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};

/// 1234567 as `1,234,567`.
pub(super) fn number(n: u64) -> String {
    let digits = n.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A number with three digits at most, for tabs and axes: `999`, `1.2k`, `45k`, `3.4M`.
pub(super) fn compact(n: u64) -> String {
    let scaled = |unit: u64, suffix: &str| {
        let tenths = n / (unit / 10);
        if tenths < 100 && !tenths.is_multiple_of(10) {
            format!("{}.{}{suffix}", tenths / 10, tenths % 10)
        } else {
            format!("{}{suffix}", tenths / 10)
        }
    };
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => scaled(1_000, "k"),
        1_000_000..1_000_000_000 => scaled(1_000_000, "M"),
        _ => scaled(1_000_000_000, "G"),
    }
}

/// `1 job`, `2 jobs`.
pub(super) fn counted(n: u64, one: &str, many: &str) -> String {
    format!("{} {}", number(n), if n == 1 { one } else { many })
}

/// A duration with two units at most: `12 ms`, `1.4 s`, `2 min 3 s`, `1 h 4 min`, `3 d 4 h`.
pub(super) fn duration(duration: Duration) -> String {
    let (ms, s) = (duration.as_millis(), duration.as_secs());
    let two = |big: u64, big_unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{big} {big_unit}"),
        small => format!("{big} {big_unit} {small} {small_unit}"),
    };
    match s {
        0 if ms == 0 && !duration.is_zero() => "< 1 ms".into(),
        0 => format!("{ms} ms"),
        1..10 => format!("{}.{} s", s, duration.subsec_millis() / 100),
        10..60 => format!("{s} s"),
        60..3_600 => two(s / 60, "min", s % 60, "s"),
        3_600..86_400 => two(s / 3_600, "h", s % 3_600 / 60, "min"),
        _ => two(s / 86_400, "d", s % 86_400 / 3_600, "h"),
    }
}

/// The duration between two instants; zero if they are in the other order.
pub(super) fn between(from: DateTime<Utc>, to: DateTime<Utc>) -> Duration {
    (to - from).to_std().unwrap_or_default()
}

/// A number of seconds.
pub(super) fn seconds(seconds: f64) -> String {
    duration(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX))
}

/// An instant seen from now, to the nearest unit: `3 min ago`, `in 2 h`, `now`. The script has the same rules.
pub(super) fn relative(at: DateTime<Utc>, now: DateTime<Utc>) -> String {
    let past = now - at;
    let distance = past.abs();
    let seconds = distance.num_seconds();
    let nearest = |unit: i64| (seconds + unit / 2) / unit;
    let text = match seconds {
        0 => return "now".into(),
        1..60 => format!("{seconds} s"),
        60..3_570 => format!("{} min", nearest(60)),
        3_570..84_600 => format!("{} h", nearest(3_600)),
        _ => format!("{} d", nearest(86_400)),
    };
    if past > TimeDelta::zero() { format!("{text} ago") } else { format!("in {text}") }
}

/// An instant for programs.
pub(super) fn machine(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// An instant for people, with milliseconds.
pub(super) fn exact(at: DateTime<Utc>) -> String {
    at.format("%Y-%m-%d %H:%M:%S%.3f UTC").to_string()
}

/// A share in percent. One that is not zero never reads `0 %`.
pub(super) fn percent(part: u64, whole: u64) -> String {
    let percent = part as f64 * 100.0 / whole.max(1) as f64;
    match percent {
        _ if part == 0 => "0 %".into(),
        ..0.1 => "under 0.1 %".into(),
        ..10.0 => format!("{percent:.1} %"),
        _ => format!("{percent:.0} %"),
    }
}

/// Names in a sentence: `a`, `a and b`, `a, b and 3 more`.
pub(super) fn listed(names: &[impl AsRef<str>], max: usize) -> String {
    let shown: Vec<&str> = names.iter().take(max).map(AsRef::as_ref).collect();
    let more = names.len() - shown.len();
    match (shown.split_last(), more) {
        (Some((last, [])), 0) => (*last).to_owned(),
        (Some((last, others)), 0) => format!("{} and {last}", others.join(", ")),
        _ => format!("{} and {more} more", shown.join(", ")),
    }
}

/// An instant in words, to the minute.
pub(super) fn in_words(at: DateTime<Utc>) -> String {
    at.format("%-d %b %Y %H:%M UTC").to_string()
}

/// Both ends of an id, for people: ids that are created together begin alike. Pages link it to
/// the whole id.
pub(super) fn id_ends(id: uuid::Uuid) -> String {
    let digits = id.simple().to_string();
    format!("{}…{}", &digits[..8], &digits[26..])
}

/// The first characters of a text, with an ellipsis if there are more.
pub(super) fn shortened(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", text[..end].trim_end()),
    }
}

/// A number of bytes: `17 B`, `1.5 KB`, `2.0 MB`.
pub(super) fn bytes(bytes: usize) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} KB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_a_unit() {
        assert_eq!([17, 1_500, 2_000_000].map(bytes), ["17 B", "1.5 KB", "2.0 MB"]);
    }

    #[test]
    fn numbers_are_grouped_and_compacted() {
        for (n, grouped, short) in [
            (0, "0", "0"),
            (999, "999", "999"),
            (1_000, "1,000", "1k"),
            (1_250, "1,250", "1.2k"),
            (45_999, "45,999", "45k"),
            (1_234_567, "1,234,567", "1.2M"),
            (2_000_000_000, "2,000,000,000", "2G"),
        ] {
            assert_eq!((number(n).as_str(), compact(n).as_str()), (grouped, short));
        }
    }

    #[test]
    fn durations_have_at_most_two_units() {
        for (ms, text) in [
            (0, "0 ms"),
            (999, "999 ms"),
            (1_450, "1.4 s"),
            (59_999, "59 s"),
            (60_000, "1 min"),
            (123_000, "2 min 3 s"),
            (3_840_000, "1 h 4 min"),
            (273_600_000, "3 d 4 h"),
        ] {
            assert_eq!(duration(Duration::from_millis(ms)), text);
        }
        assert_eq!(duration(Duration::from_micros(3)), "< 1 ms");
    }

    #[test]
    fn instants_are_relative_to_now_in_both_directions() {
        let now = "2031-05-06T07:08:09Z".parse::<DateTime<Utc>>().unwrap();
        for (seconds, text) in [
            (0, "now"),
            (-5, "5 s ago"),
            (-185, "3 min ago"),
            (-7_300, "2 h ago"),
            (-200_000, "2 d ago"),
            (89, "in 1 min"),
            (90, "in 2 min"),
            (3_569, "in 59 min"),
            (3_570, "in 1 h"),
            (7_140, "in 2 h"),
            (84_599, "in 23 h"),
            (84_600, "in 1 d"),
        ] {
            assert_eq!(relative(now + TimeDelta::seconds(seconds), now), text);
        }
        assert_eq!(exact(now), "2031-05-06 07:08:09.000 UTC");
    }

    #[test]
    fn a_share_of_something_is_never_zero_percent() {
        for (part, whole, text) in [
            (0, 7, "0 %"),
            (0, 0, "0 %"),
            (1, 5_000, "under 0.1 %"),
            (20, 2_214, "0.9 %"),
            (1, 40, "2.5 %"),
            (1, 2, "50 %"),
            (7, 7, "100 %"),
        ] {
            assert_eq!(percent(part, whole), text);
        }
    }

    #[test]
    fn many_names_are_shortened_to_a_number() {
        assert_eq!(listed(&["a"], 2), "a");
        assert_eq!(listed(&["a", "b", "c"], 3), "a, b and c");
        assert_eq!(listed(&["a", "b", "c", "d"], 2), "a, b and 2 more");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(shortened("añb", 3), "añb");
        assert_eq!(shortened("añbc", 3), "añb…");
    }
}
