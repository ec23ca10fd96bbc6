//! `summarize_text`: an extractive summary, made of the most relevant sentences in their
//! original order. It uses neither a model nor randomness: the same text always gives
//! the same summary.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Kind;
use crate::worker::{Context, Failure};

/// The word limit if the payload has none.
pub(super) const DEFAULT_MAX_WORDS: u32 = 100;

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
                "text": { "type": "string", "description": "The text to summarize." },
                "max_words": {
                    "type": ["integer", "null"],
                    "minimum": 1,
                    "maximum": u32::MAX,
                    "default": DEFAULT_MAX_WORDS,
                    "description": "The maximum number of words in the summary.",
                },
            },
            "required": ["text"],
            "additionalProperties": false,
        })
    }
}

impl SummarizeText {
    pub(super) fn max_words(&self) -> usize {
        self.max_words.unwrap_or(DEFAULT_MAX_WORDS).try_into().unwrap_or(usize::MAX)
    }
}

pub(super) async fn summarize(job: SummarizeText, ctx: Context) -> Result<(), Failure> {
    job.check().map_err(Failure::permanent)?;
    let max_words = job.max_words();
    let summary = ctx.spawn_blocking(move || extract(&job.text, max_words)).await?;
    ctx.set_result(&summary)?;
    Ok(())
}

#[derive(Debug, PartialEq, Eq, Serialize)]
struct Summary {
    summary: String,
    words: usize,
    sentences: usize,
}

/// The best sentences that together have at most `max_words` words.
fn extract(text: &str, max_words: usize) -> Summary {
    let sentences = sentences(text);
    let mut ranked: Vec<usize> = (0..sentences.len()).collect();
    let scores = scores(&sentences);
    ranked.sort_by_key(|index| (Reverse(scores[*index]), *index));

    let mut words_left = max_words;
    let mut chosen: Vec<usize> = Vec::new();
    for index in &ranked {
        let words = sentences[*index].len();
        if words <= words_left {
            words_left -= words;
            chosen.push(*index);
        }
    }
    chosen.sort_unstable();
    let mut words: Vec<&str> = chosen.iter().flat_map(|index| sentences[*index].iter().copied()).collect();
    // If no sentence is short enough, use the beginning of the best one.
    if chosen.is_empty()
        && let Some(best) = ranked.first()
    {
        words = sentences[*best][..max_words].to_vec();
        chosen.push(*best);
    }
    Summary { summary: words.join(" "), words: words.len(), sentences: chosen.len() }
}

/// The words of each sentence. Words are separated by whitespace.
fn sentences(text: &str) -> Vec<Vec<&str>> {
    let mut sentences = Vec::new();
    let mut sentence = Vec::new();
    for line in text.lines() {
        // A blank line also ends a sentence, because headings have no full stop.
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

/// Whether a sentence ends with this word; `next` is the next word in the line.
fn ends_sentence(word: &str, next: Option<&str>) -> bool {
    let unquoted = word.trim_end_matches(['"', '\'', ')', ']', '\u{201d}', '\u{2019}', '\u{bb}']);
    if unquoted.ends_with(['!', '?', '\u{3002}']) {
        return true;
    }
    let Some(stem) = unquoted.strip_suffix(['.', '\u{2026}']) else { return false };
    let initial = stem.chars().count() == 1 && stem.chars().all(char::is_uppercase);
    let continues = next.is_some_and(|next| next.starts_with(char::is_lowercase));
    !(initial || continues || ABBREVIATIONS.contains(&normalized(stem).as_str()))
}

/// The relevance of each sentence: the mean frequency of its significant words, with a
/// small bonus for sentences that have several of them.
fn scores(sentences: &[Vec<&str>]) -> Vec<usize> {
    let significant: Vec<HashSet<String>> = sentences
        .iter()
        .map(|words| words.iter().map(|word| normalized(word)).filter(|word| is_significant(word)).collect())
        .collect();
    let mut frequency: HashMap<String, usize> = HashMap::new();
    for word in sentences.iter().flatten().map(|word| normalized(word)).filter(|word| is_significant(word)) {
        *frequency.entry(word).or_default() += 1;
    }
    significant
        .iter()
        .map(|words| words.iter().map(|word| frequency[word]).sum::<usize>() * 1000 / (words.len() + 3))
        .collect()
}

/// A word in lower case, without the punctuation around it.
fn normalized(word: &str) -> String {
    word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase()
}

fn is_significant(word: &str) -> bool {
    !word.is_empty() && STOP_WORDS.binary_search(&word).is_err()
}

const ABBREVIATIONS: &[&str] = &[
    "approx", "cf", "dr", "e.g", "etc", "fig", "i.e", "inc", "jr", "ltd", "mr", "mrs", "ms", "no", "prof",
    "sr", "st", "vs",
];

/// Common English words that do not indicate the topic. Sorted, for the binary search.
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

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;
    use crate::Status;
    use crate::builtin::Settings;
    use crate::builtin::testing::run;

    const HARBOUR: &str = "Harbour news\n\n\
        The harbour opened a new crane today. Dr. A. Lovelace, who built the crane, was there. \
        It rained in the morning. \
        The crane lifts forty tonnes, i.e. twice what the old harbour crane could lift! \
        Somebody sold ice cream. Was the harbour\nmaster pleased? He said so.";

    #[test]
    fn text_is_split_into_sentences() {
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
    fn the_most_relevant_sentences_are_kept_in_their_order() {
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
        assert_eq!(extract(HARBOUR, 22), summary, "the result is always the same");
    }

    #[test]
    fn a_summary_is_never_longer_than_the_limit() {
        for max_words in 1..60 {
            let Summary { summary, words, sentences } = extract(HARBOUR, max_words);
            assert!((1..=max_words).contains(&words), "{words} words of {max_words}");
            assert_eq!(summary.split_whitespace().count(), words);
            assert!(sentences >= 1);
        }
        let whole = extract(HARBOUR, 1000);
        assert_eq!(whole.summary, HARBOUR.split_whitespace().collect::<Vec<_>>().join(" "));
        assert_eq!(whole.sentences, 8);
    }

    #[test]
    fn if_every_sentence_is_too_long_the_best_one_is_truncated_at_a_word() {
        let text = "Boats come and boats go and boats sink. It is so very cold in here today.";
        let truncated = Summary { summary: "Boats come and".into(), words: 3, sentences: 1 };
        assert_eq!(extract(text, 3), truncated);
    }

    #[test]
    fn an_empty_text_has_an_empty_summary() {
        for text in ["", " \n\n\t "] {
            assert_eq!(extract(text, 5), Summary { summary: String::new(), words: 0, sentences: 0 });
        }
        assert_eq!(extract("!!! \u{2026} the", 5).words, 3);
    }

    #[test]
    fn the_stop_words_are_sorted() {
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
