//! Names for ids. Each engine gets ids of its own, so both sides replace the ids of their replies by names, in the order
//! in which the ids first appear: `<1>`, `<2>` and so on. The script uses the names, and each side replaces them by its
//! ids before it sends a request.

use std::collections::HashMap;

use uuid::Uuid;

/// The length of an id with its hyphens.
const LENGTH: usize = 36;

/// The names of the ids that one side has seen.
#[derive(Default)]
pub(super) struct Names {
    ids: Vec<Uuid>,
    numbers: HashMap<Uuid, usize>,
}

impl Names {
    /// Replaces ids by names. An id that appears for the first time gets the next name.
    pub(super) fn hide(&mut self, text: &str) -> String {
        let (mut hidden, mut rest) = (String::with_capacity(text.len()), text);
        while let Some((start, id)) = first_id(rest) {
            hidden += &rest[..start];
            hidden += &format!("<{}>", self.number(id));
            rest = &rest[start + LENGTH..];
        }
        hidden + rest
    }

    /// Replaces names by ids.
    pub(super) fn show(&self, text: &str) -> String {
        let (mut shown, mut rest) = (String::with_capacity(text.len()), text);
        while let Some(start) = rest.find('<') {
            let number =
                rest[start + 1..].split_once('>').and_then(|(number, _)| number.parse::<usize>().ok());
            let id = number.and_then(|number| self.ids.get(number.checked_sub(1)?));
            let Some((number, id)) = number.zip(id) else {
                shown += &rest[..=start];
                rest = &rest[start + 1..];
                continue;
            };
            shown += &rest[..start];
            shown += &id.to_string();
            rest = &rest[start + number.to_string().len() + 2..];
        }
        shown + rest
    }

    fn number(&mut self, id: Uuid) -> usize {
        *self.numbers.entry(id).or_insert_with(|| {
            self.ids.push(id);
            self.ids.len()
        })
    }
}

/// The first id in a text, and where it starts.
fn first_id(text: &str) -> Option<(usize, Uuid)> {
    let hyphens = text.match_indices('-').map(|(at, _)| at);
    let mut starts = hyphens.filter_map(|hyphen| hyphen.checked_sub(8));
    starts.find_map(|start| {
        let id = text.get(start..start + LENGTH)?;
        Some((start, Uuid::try_parse(id).ok()?))
    })
}

#[test]
fn ids_are_named_in_the_order_of_their_appearance() {
    let (one, two) = (Uuid::now_v7(), Uuid::now_v7());
    let mut names = Names::default();
    let text = format!("{two} is-not {one}, but {two}; </jobs/{one}>");
    assert_eq!(names.hide(&text), "<1> is-not <2>, but <1>; </jobs/<2>>");
    assert_eq!(names.show("<1> is-not <2>, but <1>; </jobs/<2>>"), text);
    assert_eq!(names.show("<3> < <> <x>"), "<3> < <> <x>");
}
