//! Times as people read them: how long ago, or how soon. `--utc` and `--json` show exact
//! times instead.

use chrono::TimeDelta;

/// The units, largest first. A unit is used from twice its length on, so that `119s` is
/// not rounded to `1m`.
const UNITS: [(&str, i64); 4] = [("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)];

/// A length of time in one unit, like `33s`, `5m` or `12d`. A negative one is `0s`: the clocks
/// of two machines differ a little.
pub(crate) fn rounded(time: TimeDelta) -> String {
    let seconds = time.num_seconds().max(0);
    let (unit, size) = UNITS.iter().find(|(_, size)| seconds >= 2 * size).unwrap_or(&("s", 1));
    format!("{}{unit}", seconds / size)
}

/// `5m ago`, or `in 5m` for a time in the future.
pub(crate) fn relative(since: TimeDelta) -> String {
    if since.num_seconds() >= 0 {
        format!("{} ago", rounded(since))
    } else {
        format!("in {}", rounded(-since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_shown_in_one_unit() {
        for (seconds, expected) in [
            (-5, "0s"),
            (0, "0s"),
            (1, "1s"),
            (119, "119s"),
            (120, "2m"),
            (7_199, "119m"),
            (7_200, "2h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (86_400 * 400, "400d"),
        ] {
            assert_eq!(rounded(TimeDelta::seconds(seconds)), expected);
        }
        assert_eq!(relative(TimeDelta::seconds(300)), "5m ago");
        assert_eq!(relative(TimeDelta::milliseconds(-400)), "0s ago");
        assert_eq!(relative(TimeDelta::seconds(-300)), "in 5m");
    }
}
