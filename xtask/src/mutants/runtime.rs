//! The switch of the mutants. `cargo xtask mutants` adds this file to its copy of the
//! library, as the module `mutant`; the library itself does not have it.
//!
//! At most one mutant is on: the one whose number is in `LONGSHORE_MUTANT`. When its code
//! is reached, the file that `LONGSHORE_MUTANT_REACHED` names is created.

use std::{
    collections::HashMap,
    env, fs,
    sync::{LazyLock, Mutex, Once, PoisonError},
};

/// In a statement, these enclose and separate the variants of a text: the original, then
/// the number and the text of each mutant. No statement contains these characters, and
/// both databases refuse them, so no statement can bypass [`sql`] unnoticed.
pub(crate) const START: char = '\u{1}';
pub(crate) const NEXT: char = '\u{2}';
pub(crate) const END: char = '\u{3}';

static ACTIVE: LazyLock<Option<usize>> =
    LazyLock::new(|| env::var("LONGSHORE_MUTANT").ok().and_then(|number| number.parse().ok()));

/// Whether this mutant is on. Called by the functions that contain it.
pub(crate) fn is(number: usize) -> bool {
    let is_active = *ACTIVE == Some(number);
    if is_active {
        note_reached();
    }
    is_active
}

/// The statement as the mutant that is on wants it. Called for every statement.
pub(crate) fn sql(statement: &str) -> &str {
    static CHOSEN: LazyLock<Mutex<HashMap<String, &'static str>>> = LazyLock::new(Mutex::default);
    if !statement.contains(START) {
        return statement;
    }
    let mut chosen = CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = chosen.get(statement) {
        return text;
    }
    let (text, is_changed) = choose(statement, *ACTIVE);
    if is_changed {
        note_reached();
    }
    // Never freed: the library's statements are `&'static str`, and there are few.
    let text: &'static str = Box::leak(text.into_boxed_str());
    chosen.insert(statement.to_owned(), text);
    text
}

/// The statement with the variants of this mutant, and whether it has one.
pub(crate) fn choose(statement: &str, active: Option<usize>) -> (String, bool) {
    let mut pieces = statement.split(START);
    let (mut text, mut is_changed) = (pieces.next().unwrap_or_default().to_owned(), false);
    for piece in pieces {
        let (variants, rest) = piece.split_once(END).unwrap_or((piece, ""));
        let variants: Vec<&str> = variants.split(NEXT).collect();
        let is_active = |number: &str| active.is_some_and(|active| number == active.to_string());
        let changed = variants[1..].chunks_exact(2).find(|variant| is_active(variant[0]));
        is_changed |= changed.is_some();
        text.push_str(changed.map_or(variants[0], |variant| variant[1]));
        text.push_str(rest);
    }
    (text, is_changed)
}

fn note_reached() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(file) = env::var_os("LONGSHORE_MUTANT_REACHED") {
            fs::write(file, "").expect("the folder of LONGSHORE_MUTANT_REACHED exists");
        }
    });
}
