//! Short forms of ids, for people: how an id is shortened, and which ids a short form can
//! mean. Finding the jobs belongs to the store.
//!
//! The first digits of an id are the time of its creation, so ids that are created together
//! begin alike. The last digits are random. The short form therefore has both ends: the
//! first eight digits are a range of the primary key, 65 seconds wide, and the last six
//! distinguish the ids in it.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

use crate::error::{Error, Result};
use crate::job::JobId;

/// Between the two ends of a short form.
const GAP: &str = "..";
const HEAD_DIGITS: usize = 8;
/// How many of the last digits a short form has if nothing else is needed.
const TAIL_DIGITS: usize = 6;
/// The digits of the last group of an id, all of which are random.
const MAX_TAIL_DIGITS: usize = 12;
/// Fewer digits than this are probably not meant as an id.
const MIN_PREFIX_DIGITS: usize = 4;

/// What a person writes for an id: the id, its first characters, or its short form, like
/// `01990a2b..6789ab`.
///
/// ```
/// use longshore::{IdPattern, JobId};
///
/// let id: JobId = "01990a2b-0000-7000-8000-0123456789ab".parse()?;
/// assert_eq!(id.short(), "01990a2b..6789ab");
/// for written in ["01990a2b..6789ab", "01990a2b-00", "01990a2b-0000-7000-8000-0123456789ab"] {
///     assert!(written.parse::<IdPattern>()?.matches(id.0));
/// }
/// # Ok::<(), longshore::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdPattern {
    /// The first digits, without dashes.
    head: String,
    /// The last digits; may be empty.
    tail: String,
}

impl IdPattern {
    /// The id, if the pattern is a whole one.
    pub fn exact(&self) -> Option<Uuid> {
        if self.head.len() == 32 { Uuid::try_parse(&self.head).ok() } else { None }
    }

    /// Whether the pattern can mean this id.
    pub fn matches(&self, id: Uuid) -> bool {
        let digits = id.simple().to_string();
        digits.starts_with(&self.head) && digits.ends_with(&self.tail)
    }

    /// The lowest and the highest id with these first digits.
    pub fn bounds(&self) -> (Uuid, Uuid) {
        let filled = |with: char| {
            let digits: String = self.head.chars().chain(std::iter::repeat(with)).take(32).collect();
            // Cannot fail: these are 32 hexadecimal digits.
            Uuid::try_parse(&digits).unwrap_or_default()
        };
        (filled('0'), filled('f'))
    }

    /// The last digits of the id.
    pub(crate) fn tail(&self) -> &str {
        &self.tail
    }
}

impl fmt::Display for IdPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.exact(), self.tail.as_str()) {
            (Some(id), _) => id.fmt(f),
            (None, "") => with_dashes(&self.head).fmt(f),
            (None, tail) => write!(f, "{}{GAP}{tail}", with_dashes(&self.head)),
        }
    }
}

impl FromStr for IdPattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |why: &str| {
            Err(Error::invalid(
                "id",
                format!(
                    "`{text}` is not an id: {why}; ids are UUIDs, as the lists show them; give a whole id, its \
                     first {MIN_PREFIX_DIGITS} or more characters, or its short form like 01990a2b{GAP}6789ab"
                ),
            ))
        };
        let digits = |part: &str| part.replace('-', "").to_ascii_lowercase();
        let (head, tail) = match text.trim().split_once(GAP) {
            Some((head, tail)) => (digits(head), Some(digits(tail))),
            None => (digits(text.trim()), None),
        };
        if !head.chars().chain(tail.iter().flat_map(|tail| tail.chars())).all(|c| c.is_ascii_hexdigit()) {
            return invalid("it has characters other than hexadecimal digits and dashes");
        }
        let max_digits = if tail.is_some() { 31 } else { 32 };
        if head.len() > max_digits || tail.as_ref().is_some_and(|tail| tail.len() > MAX_TAIL_DIGITS) {
            return invalid("it is too long");
        }
        // The digits before the gap limit how many ids are compared with those after it.
        if tail.is_some() && head.len() < HEAD_DIGITS {
            return invalid("it has fewer than 8 digits before the dots");
        }
        if head.len() < MIN_PREFIX_DIGITS {
            return invalid("it is too short");
        }
        Ok(IdPattern { head, tail: tail.unwrap_or_default() })
    }
}

impl JobId {
    /// The short form for people. It has both ends of the id, because ids that are created
    /// together begin alike. Every command accepts it.
    pub fn short(&self) -> String {
        shortened(self.0, TAIL_DIGITS)
    }
}

/// The short forms of these ids, long enough to distinguish them from each other.
pub fn short_forms(ids: &[Uuid]) -> Vec<String> {
    for digits in [TAIL_DIGITS, MAX_TAIL_DIGITS] {
        let short: Vec<String> = ids.iter().map(|id| shortened(*id, digits)).collect();
        let mut distinct = short.clone();
        distinct.sort_unstable();
        distinct.dedup();
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        if distinct.len() == ids.len() {
            return short;
        }
    }
    ids.iter().map(Uuid::to_string).collect()
}

fn shortened(id: Uuid, tail: usize) -> String {
    let digits = id.simple().to_string();
    format!("{}{GAP}{}", &digits[..HEAD_DIGITS], &digits[32 - tail..])
}

/// The first digits of an id, with its dashes.
fn with_dashes(digits: &str) -> String {
    let mut text = String::with_capacity(36);
    for (at, digit) in digits.chars().enumerate() {
        if matches!(at, 8 | 12 | 16 | 20) {
            text.push('-');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "01990a2b-c3d4-7abc-8def-0123456789ab";

    fn pattern(text: &str) -> IdPattern {
        text.parse().unwrap()
    }

    #[test]
    fn an_id_is_found_by_itself_by_its_beginning_and_by_both_ends() {
        let id: Uuid = ID.parse().unwrap();
        for text in [
            ID,
            "01990A2B-C3D4-7abc-8def-0123456789ab",
            "01990a2bc3d47abc8def0123456789ab",
            "0199",
            "01990a2b",
            "01990a2b-",
            "01990a2b-c3d4-7",
            "01990a2b..6789ab",
            "01990a2b..ab",
            " 01990a2b.. ",
            "01990a2b-c3..0123456789ab",
        ] {
            let pattern = pattern(text);
            assert!(pattern.matches(id), "{text}");
            let (low, high) = pattern.bounds();
            assert!(low <= id && id <= high, "{text}");
            assert_eq!(pattern.exact(), (text.len() >= 32).then_some(id), "{text}");
            assert_eq!(pattern.to_string().parse::<IdPattern>().unwrap(), pattern, "{text}");
        }
        for text in ["01990a2c", "0199..6789ab00", "01990a2b..6789ac"] {
            assert!(!text.parse::<IdPattern>().is_ok_and(|pattern| pattern.matches(id)), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_an_id_is_refused_with_a_remedy() {
        for text in ["", "7", "019", "..6789ab", "0199..6789ab", "greet", "01990a2b..0123456789abc", "ü"] {
            let error = text.parse::<IdPattern>().unwrap_err();
            assert_eq!(error.field(), Some("id"), "{text}");
            assert!(error.to_string().contains("give a whole id"), "{error}");
        }
    }

    #[test]
    fn short_forms_are_distinct() {
        let id = |text: &str| text.parse::<Uuid>().unwrap();
        let (one, same_end) = (id(ID), id("01990a2b-c3d4-7abc-8def-ff23456789ab"));
        assert_eq!(short_forms(&[one]), ["01990a2b..6789ab"]);
        assert_eq!(short_forms(&[one, one]), ["01990a2b..6789ab", "01990a2b..6789ab"]);
        assert_eq!(short_forms(&[one, same_end])[1], "01990a2b..ff23456789ab");
        let same_ends = id("01990a2b-c3d4-7abc-8dee-0123456789ab");
        assert_eq!(short_forms(&[one, same_ends]), [one.to_string(), same_ends.to_string()]);
        assert_eq!(JobId(one).short(), "01990a2b..6789ab");
    }

    #[test]
    fn the_bounds_are_a_range_of_ids() {
        let (low, high) = pattern("01990a2b-c3").bounds();
        assert_eq!(low.to_string(), "01990a2b-c300-0000-0000-000000000000");
        assert_eq!(high.to_string(), "01990a2b-c3ff-ffff-ffff-ffffffffffff");
        assert_eq!(pattern(ID).bounds(), (ID.parse().unwrap(), ID.parse().unwrap()));
    }
}
