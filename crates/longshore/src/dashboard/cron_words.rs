//! Cron expressions in words, for those that people write most. Others are shown as they are.

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// `0 3 * * 1` as `every Monday at 03:00`. `None` if there are no simple words for it.
pub(super) fn words(expression: &str) -> Option<String> {
    let fields: Vec<&str> = expression.split_whitespace().collect();
    match fields.as_slice() {
        [second, minute, hour, day, month, weekday] => {
            with_seconds(second, [minute, hour, day, month, weekday])
        }
        [minute, hour, day, month, weekday] => in_words([minute, hour, day, month, weekday]),
        [name] => match *name {
            "@hourly" => Some("every hour".into()),
            "@daily" | "@midnight" => Some("every day at 00:00".into()),
            "@weekly" => Some("every Sunday at 00:00".into()),
            "@monthly" => Some("on day 1 of every month at 00:00".into()),
            "@yearly" | "@annually" => Some("every year on 1 January at 00:00".into()),
            _ => None,
        },
        _ => None,
    }
}

fn with_seconds(second: &str, rest: [&str; 5]) -> Option<String> {
    match (second, rest) {
        ("0" | "00", rest) => in_words(rest),
        (second, ["*", "*", "*", "*", "*"]) => match (second, every(second)) {
            ("*", _) => Some("every second".into()),
            (_, Some(n)) => Some(format!("every {n} seconds")),
            (second, None) => Some(format!("every minute at second {}", number(second, 59)?)),
        },
        _ => None,
    }
}

fn in_words([minute, hour, day, month, weekday]: [&str; 5]) -> Option<String> {
    match (minute, hour, day, month, weekday) {
        ("*", "*", "*", "*", "*") => Some("every minute".into()),
        (minute, "*", "*", "*", "*") => match every(minute) {
            Some(n) => Some(format!("every {n} minutes")),
            None if minute == "0" => Some("every hour".into()),
            None => Some(format!("every hour at minute {}", listed(minute, 59, |n| n.to_string())?)),
        },
        (minute, hour, "*", "*", "*") if every(hour).is_some() => {
            let (minute, n) = (number(minute, 59)?, every(hour)?);
            Some(if minute == 0 {
                format!("every {n} hours")
            } else {
                format!("every {n} hours at minute {minute}")
            })
        }
        (minute, hour, day, month, weekday) => {
            let minute = number(minute, 59)?;
            let times = listed(hour, 23, |hour| format!("{hour:02}:{minute:02}"))?;
            let days = match (day, month, weekday) {
                ("*", "*", "*") => "every day".to_owned(),
                ("*", "*", weekday) => format!("every {}", weekdays(weekday)?),
                (day, "*", "*") => {
                    format!("on day {} of every month", listed(day, 31, |day| day.to_string())?)
                }
                (day, month, "*") => {
                    let month = MONTHS.get(usize::try_from(number(month, 12)?).ok()?.checked_sub(1)?)?;
                    format!("every year on {} {month}", number(day, 31)?)
                }
                _ => return None,
            };
            Some(format!("{days} at {times}"))
        }
    }
}

/// The n of `*/n`.
fn every(field: &str) -> Option<u32> {
    field.strip_prefix("*/")?.parse().ok().filter(|n| *n > 1)
}

fn number(field: &str, max: u32) -> Option<u32> {
    field.parse().ok().filter(|n| *n <= max)
}

/// `1,2,3` as `1, 2 and 3`.
fn listed(field: &str, max: u32, name: impl Fn(u32) -> String) -> Option<String> {
    let names: Vec<String> =
        field.split(',').map(|part| number(part, max).map(&name)).collect::<Option<_>>()?;
    joined(&names)
}

fn joined(names: &[String]) -> Option<String> {
    let (last, others) = names.split_last()?;
    Some(if others.is_empty() { last.clone() } else { format!("{} and {last}", others.join(", ")) })
}

fn weekdays(field: &str) -> Option<String> {
    match field.to_ascii_uppercase().as_str() {
        "1-5" | "MON-FRI" => Some("weekday".into()),
        "0,6" | "6,0" | "6,7" | "SAT,SUN" | "SUN,SAT" => Some("weekend day".into()),
        field => {
            let name = |part: &str| {
                let by_name = DAYS.iter().find(|day| day[..3].eq_ignore_ascii_case(part));
                by_name
                    .or_else(|| DAYS.get(usize::try_from(number(part, 7)?).ok()? % 7))
                    .map(|day| (*day).to_owned())
            };
            joined(&field.split(',').map(name).collect::<Option<Vec<_>>>()?)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_expressions_have_words() {
        for (expression, expected) in [
            ("* * * * *", "every minute"),
            ("*/5 * * * *", "every 5 minutes"),
            ("0 * * * *", "every hour"),
            ("15,45 * * * *", "every hour at minute 15 and 45"),
            ("0 */6 * * *", "every 6 hours"),
            ("30 */2 * * *", "every 2 hours at minute 30"),
            ("0 3 * * *", "every day at 03:00"),
            ("0 9,17 * * *", "every day at 09:00 and 17:00"),
            ("30 8 * * 1-5", "every weekday at 08:30"),
            ("0 0 * * 7", "every Sunday at 00:00"),
            ("0 0 * * mon,wed", "every Monday and Wednesday at 00:00"),
            ("0 4 1,15 * *", "on day 1 and 15 of every month at 04:00"),
            ("0 0 24 12 *", "every year on 24 December at 00:00"),
            ("*/10 * * * * *", "every 10 seconds"),
            ("0 0 3 * * *", "every day at 03:00"),
            ("@daily", "every day at 00:00"),
        ] {
            assert_eq!(words(expression).as_deref(), Some(expected), "{expression}");
        }
    }

    #[test]
    fn others_have_none() {
        for expression in ["", "5-10 * * * *", "0 0 L * *", "0 0 * * MON#2", "0 0 1 * 1", "0 0 1 13 *", "x"] {
            assert_eq!(words(expression), None, "{expression}");
        }
    }
}
