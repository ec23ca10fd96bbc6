//! The valid word that a mistyped one is most similar to, for messages such as
//! ``did you mean `send_email`?``. Owns the measure of similarity. The callers own the
//! lists of valid words and the messages.

/// The most similar candidate; `None` if no candidate is similar. Upper and lower case
/// count as equal. Of equally similar candidates, the first one wins.
///
/// ```
/// use longshore::nearest::nearest;
///
/// assert_eq!(nearest("sned_email", ["resize_image", "send_email"]), Some("send_email"));
/// assert_eq!(nearest("report", ["resize_image", "send_email"]), None);
/// ```
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let word = letters(word);
    let similar = candidates.into_iter().filter_map(|candidate| {
        let letters = letters(candidate);
        let distance = edits(&word, &letters);
        // A third of the letters may be wrong. With more, the words only happen to share
        // some letters.
        (distance <= (word.len().max(letters.len()) / 3).max(1)).then_some((distance, candidate))
    });
    similar.min_by_key(|(distance, _)| *distance).map(|(_, candidate)| candidate)
}

/// The start of a sentence, like ``; did you mean `mail`?``, or nothing if no candidate
/// is similar.
pub fn suggestion<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    nearest(word, candidates).map(|found| format!("; did you mean `{found}`?")).unwrap_or_default()
}

/// Longer words are compared by their beginning, because the cost grows with the square of
/// the length.
const MAX_LETTERS: usize = 64;

fn letters(word: &str) -> Vec<char> {
    word.chars().flat_map(char::to_lowercase).take(MAX_LETTERS).collect()
}

/// How many letters must be inserted, removed, replaced or swapped with their neighbour to
/// turn one word into the other.
fn edits(one: &[char], other: &[char]) -> usize {
    let mut before_last: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, b) in other.iter().enumerate() {
            let replaced = last[j] + usize::from(a != b);
            let mut cost = replaced.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *a == other[j - 1] && one[i - 1] == *b {
                cost = cost.min(before_last[j - 1] + 1);
            }
            row.push(cost);
        }
        before_last = std::mem::replace(&mut last, row);
    }
    last[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distance(one: &str, other: &str) -> usize {
        edits(&letters(one), &letters(other))
    }

    #[test]
    fn each_typing_mistake_counts_once() {
        for (one, other, expected) in [
            ("mail", "mail", 0),
            ("MAIL", "mail", 0),
            ("mial", "mail", 1),
            ("mal", "mail", 1),
            ("maill", "mail", 1),
            ("nail", "mail", 1),
            ("", "mail", 4),
            ("send-emial", "send_email", 2),
        ] {
            assert_eq!(distance(one, other), expected, "{one} {other}");
            assert_eq!(distance(other, one), expected, "{other} {one}");
        }
    }

    #[test]
    fn only_similar_words_are_suggested() {
        let queues = ["default", "mail", "images"];
        assert_eq!(nearest("mial", queues), Some("mail"));
        assert_eq!(nearest("defualt", queues), Some("default"));
        assert_eq!(nearest("reports", queues), None);
        assert_eq!(nearest("x", ["a"]), Some("a"), "one letter may always be wrong");
        assert_eq!(nearest("mail", []), None);
        assert_eq!(suggestion("image", queues), "; did you mean `images`?");
        assert_eq!(suggestion("report", queues), "");
    }

    #[test]
    fn a_long_word_is_compared_by_its_beginning() {
        let long = "x".repeat(10_000);
        assert_eq!(nearest(&long, [long.as_str()]), Some(long.as_str()));
    }
}
