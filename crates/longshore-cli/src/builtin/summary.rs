//! `summarize_text`: the sentences that say most of what the text is about, in
//! the order of the text. No model and no chance: the same text always gives the
//! same summary.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use longshore::worker::{Context, Failure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Kind;

/// What a summary holds when nobody says.
pub(super) const DEFAULT_WORDS: u32 = 100;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SummarizeText {
    pub(super) text: String,
    pub(super) max_words: Option<u32>,
}

impl Kind for SummarizeText {
    const NAME: &'static str = "summarize_text";

    fn check(&self) -> Result<(), String> {
        match self.max_words {
            Some(0) => Err("max_words: must be at least 1; leave it out for the default".into()),
            _ => Ok(()),
        }
    }

    fn schema() -> Value {
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "summarize_text",
            "type": "object",
            "properties": {
                "text": { "type": "string", "description": "What to summarize." },
                "max_words": {
                    "type": ["integer", "null"],
                    "minimum": 1,
                    "maximum": u32::MAX,
                    "default": DEFAULT_WORDS,
                    "description": "The most words that the summary may have.",
                },
            },
            "required": ["text"],
            "additionalProperties": false,
        })
    }
}

impl SummarizeText {
    pub(super) fn most_words(&self) -> usize {
        self.max_words.unwrap_or(DEFAULT_WORDS).try_into().unwrap_or(usize::MAX)
    }
}

pub(super) async fn summarize(job: SummarizeText, ctx: Context) -> Result<(), Failure> {
    job.check().map_err(Failure::permanent)?;
    let most = job.most_words();
    let summary = ctx.spawn_blocking(move || extract(&job.text, most)).await?;
    ctx.set_result(&summary)?;
    Ok(())
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Summary {
    summary: String,
    words: usize,
    sentences: usize,
}

/// The best sentences that together have at most `most` words.
fn extract(text: &str, most: usize) -> Summary {
    let sentences = sentences(text);
    let mut ranked: Vec<usize> = (0..sentences.len()).collect();
    let scores = scores(&sentences);
    ranked.sort_by_key(|nth| (Reverse(scores[*nth]), *nth));

    let mut left = most;
    let mut chosen: Vec<usize> = Vec::new();
    for nth in &ranked {
        let words = sentences[*nth].len();
        if words <= left {
            left -= words;
            chosen.push(*nth);
        }
    }
    chosen.sort_unstable();
    let mut words: Vec<&str> = chosen.iter().flat_map(|nth| sentences[*nth].iter().copied()).collect();
    // None is short enough: as much of the best one as fits.
    if let (true, Some(best)) = (chosen.is_empty(), ranked.first()) {
        words = sentences[*best][..most].to_vec();
        chosen.push(*best);
    }
    Summary { summary: words.join(" "), words: words.len(), sentences: chosen.len() }
}

/// The words of each sentence; a word is what stands between spaces.
fn sentences(text: &str) -> Vec<Vec<&str>> {
    let mut sentences = Vec::new();
    let mut sentence = Vec::new();
    for line in text.lines() {
        // A blank line ends a sentence too: headings have no full stop.
        if line.trim().is_empty() && !sentence.is_empty() {
            sentences.push(std::mem::take(&mut sentence));
        }
        let mut words = line.split_whitespace().peekable();
        while let Some(word) = words.next() {
            sentence.push(word);
            if ends_sentence(word, words.peek().copied()) {
                sentences.push(std::mem::take(&mut sentence));
            }
        }
    }
    if !sentence.is_empty() {
        sentences.push(sentence);
    }
    sentences
}

/// Whether a sentence ends with this word, seeing the next one of the line.
fn ends_sentence(word: &str, next: Option<&str>) -> bool {
    let bare = word.trim_end_matches(['"', '\'', ')', ']', '\u{201d}', '\u{2019}', '\u{bb}']);
    if bare.ends_with(['!', '?', '\u{3002}']) {
        return true;
    }
    let Some(stem) = bare.strip_suffix(['.', '\u{2026}']) else { return false };
    let initial = stem.chars().count() == 1 && stem.chars().all(char::is_uppercase);
    let goes_on = next.is_some_and(|next| next.starts_with(char::is_lowercase));
    !(initial || goes_on || ABBREVIATIONS.contains(&plain(stem).as_str()))
}

/// How much each sentence says of what the text is about: the mean frequency of
/// its telling words, a little more for those with several of them.
fn scores(sentences: &[Vec<&str>]) -> Vec<usize> {
    let telling: Vec<HashSet<String>> = sentences
        .iter()
        .map(|words| words.iter().map(|word| plain(word)).filter(|word| tells(word)).collect())
        .collect();
    let mut frequency: HashMap<String, usize> = HashMap::new();
    for word in sentences.iter().flatten().map(|word| plain(word)).filter(|word| tells(word)) {
        *frequency.entry(word).or_default() += 1;
    }
    telling
        .iter()
        .map(|words| words.iter().map(|word| frequency[word]).sum::<usize>() * 1000 / (words.len() + 3))
        .collect()
}

/// A word as it is compared: without case and what stands around it.
fn plain(word: &str) -> String {
    word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase()
}

fn tells(word: &str) -> bool {
    !word.is_empty() && STOP_WORDS.binary_search(&word).is_err()
}

const ABBREVIATIONS: &[&str] = &[
    "approx", "cf", "dr", "e.g", "etc", "fig", "i.e", "inc", "jr", "ltd", "mr", "mrs", "ms", "no", "prof",
    "sr", "st", "vs",
];

/// Words that every English text is full of; in order, for the search.
const STOP_WORDS: &[&str] = &[
    "a", "about", "after", "again", "all", "also", "although", "am", "an", "and", "any", "are", "as", "at",
    "be", "because", "been", "before", "being", "between", "both", "but", "by", "can", "cannot", "could",
    "did", "do", "does", "doing", "down", "during", "each", "either", "else", "ever", "few", "for", "from",
    "further", "had", "has", "have", "having", "he", "her", "here", "hers", "him", "his", "how", "however",
    "i", "if", "in", "into", "is", "it", "its", "just", "may", "me", "might", "more", "most", "must", "my",
    "no", "nor", "not", "now", "of", "off", "on", "once", "only", "or", "other", "our", "out", "over", "own",
    "same", "shall", "she", "should", "so", "some", "such", "than", "that", "the", "their", "them", "then",
    "there", "these", "they", "this", "those", "through", "to", "too", "under", "until", "up", "upon", "us",
    "very", "was", "we", "were", "what", "when", "where", "which", "while", "who", "whom", "why", "will",
    "with", "would", "you", "your",
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use longshore::Status;

    use super::*;
    use crate::builtin::Settings;
    use crate::builtin::testing::run;

    const HARBOUR: &str = "Harbour news\n\n\
        The harbour opened a new crane today. Dr. A. Lovelace, who built the crane, was there. \
        It rained in the morning. \
        The crane lifts forty tonnes, i.e. twice what the old harbour crane could lift! \
        Somebody sold ice cream. Was the harbour\nmaster pleased? He said so.";

    #[test]
    fn sentences_end_where_a_reader_ends_them() {
        let found: Vec<String> = sentences(HARBOUR).iter().map(|words| words.join(" ")).collect();
        assert_eq!(
            found,
            [
                "Harbour news",
                "The harbour opened a new crane today.",
                "Dr. A. Lovelace, who built the crane, was there.",
                "It rained in the morning.",
                "The crane lifts forty tonnes, i.e. twice what the old harbour crane could lift!",
                "Somebody sold ice cream.",
                "Was the harbour master pleased?",
                "He said so.",
            ]
        );
        assert_eq!(sentences("Pi is 3.14 or so. \"Really?\" Yes\u{2026} (Fine.) Or so").len(), 5);
    }

    #[test]
    fn the_sentences_that_say_most_are_kept_in_their_order() {
        let summary = extract(HARBOUR, 22);
        assert_eq!(
            summary,
            Summary {
                summary:
                    "The harbour opened a new crane today. The crane lifts forty tonnes, i.e. twice what \
                          the old harbour crane could lift!"
                        .into(),
                words: 21,
                sentences: 2,
            }
        );
        assert_eq!(extract(HARBOUR, 22), summary, "whenever it is asked");
    }

    #[test]
    fn it_is_never_longer_than_asked() {
        for most in 1..60 {
            let Summary { summary, words, sentences } = extract(HARBOUR, most);
            assert!((1..=most).contains(&words), "{words} words of {most}");
            assert_eq!(summary.split_whitespace().count(), words);
            assert!(sentences >= 1);
        }
        let whole = extract(HARBOUR, 1000);
        assert_eq!(whole.summary, HARBOUR.split_whitespace().collect::<Vec<_>>().join(" "));
        assert_eq!(whole.sentences, 8);
    }

    #[test]
    fn if_nothing_is_short_enough_the_best_is_cut_at_a_word() {
        let text = "Boats come and boats go and boats sink. It is so very cold in here today.";
        let cut = Summary { summary: "Boats come and".into(), words: 3, sentences: 1 };
        assert_eq!(extract(text, 3), cut);
    }

    #[test]
    fn nothing_has_nothing_to_say() {
        for text in ["", " \n\n\t "] {
            assert_eq!(extract(text, 5), Summary { summary: String::new(), words: 0, sentences: 0 });
        }
        assert_eq!(extract("!!! \u{2026} the", 5).words, 3);
    }

    #[test]
    fn the_stop_words_are_in_order() {
        assert!(STOP_WORDS.is_sorted());
    }

    #[tokio::test]
    async fn the_summary_is_the_jobs_result() {
        let payload = json!({ "text": HARBOUR, "max_words": 7 });
        let job = run(&Settings::default(), "summarize_text", &payload).await;
        assert_eq!(job.status, Status::Succeeded, "{:?}", job.last_error);
        let result: Value = serde_json::from_str(job.result.unwrap().get()).unwrap();
        let expected =
            json!({ "summary": "The harbour opened a new crane today.", "words": 7, "sentences": 1 });
        assert_eq!(result, expected);
    }
}
