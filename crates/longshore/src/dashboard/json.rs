//! JSON as text: indented for reading, with every number and string exactly as it was stored, and with
//! redacted values hidden. It never parses a number, so 2^63 stays 2^63.

/// What a hidden value looks like.
pub(super) const HIDDEN: &str = "••••";

/// Where values are hidden: keys from the root, separated by dots. `*` stands for any key and any item of
/// an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn new(path: &str) -> Self {
        Path(path.split('.').map(str::to_owned).collect())
    }

    fn matches(&self, keys: &[Key]) -> bool {
        self.0.len() == keys.len()
            && self.0.iter().zip(keys).all(|(wanted, key)| {
                wanted == "*"
                    || match key {
                        Key::Name(name) => name == wanted,
                        Key::Item(i) => wanted.parse() == Ok(*i),
                    }
            })
    }
}

/// A step from a value to one of its parts.
enum Key {
    Name(String),
    Item(usize),
}

/// An indented text may have this many bytes. Indentation can make a text a hundred times longer.
pub(super) const MAX_INDENTED: usize = 256 * 1024;

/// The text of a JSON value with one field per line. `text` must be valid JSON; the database holds no other. Returns
/// `None` if the result would be too long.
pub(super) fn indent(text: &str, hidden: &[Path]) -> Option<String> {
    let capacity = (text.len() * 2).min(MAX_INDENTED);
    let out = String::with_capacity(capacity);
    let mut writer = Writer { rest: text, out, keys: Vec::new(), hidden, is_too_long: false };
    writer.value();
    (!writer.is_too_long && writer.out.len() <= MAX_INDENTED).then_some(writer.out)
}

/// The beginning of a JSON value in one line, with redacted values hidden; for a place in which little fits.
pub(super) fn beginning(text: &str, hidden: &[Path], max: usize) -> String {
    if hidden.is_empty() {
        // Nothing is hidden, so the text can be cut before it is read.
        return super::format::shortened(text, max);
    }
    match indent(text, hidden) {
        Some(indented) => {
            let words: Vec<&str> = indented.split_whitespace().collect();
            super::format::shortened(&words.join(" "), max)
        }
        None => HIDDEN.to_owned(),
    }
}

struct Writer<'t> {
    rest: &'t str,
    out: String,
    keys: Vec<Key>,
    hidden: &'t [Path],
    is_too_long: bool,
}

impl<'t> Writer<'t> {
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start_matches([' ', '\t', '\n', '\r']);
        self.rest.chars().next()
    }

    fn take(&mut self, bytes: usize) -> &'t str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }

    fn value(&mut self) {
        if self.out.len() > MAX_INDENTED {
            // The rest need not be read.
            self.is_too_long = true;
            self.rest = "";
            return;
        }
        if self.hidden.iter().any(|path| path.matches(&self.keys)) {
            self.skip();
            self.out.push('"');
            self.out.push_str(HIDDEN);
            self.out.push('"');
            return;
        }
        match self.peek() {
            Some('{') => self.members('{', '}'),
            Some('[') => self.members('[', ']'),
            Some('"') => {
                let string = self.string();
                self.out.push_str(string);
            }
            Some(_) => {
                let end = self.rest.find([',', ']', '}', ' ', '\t', '\n', '\r']).unwrap_or(self.rest.len());
                // Always moves on, even in text that is not JSON.
                let scalar = self.take(end.max(self.rest.chars().next().map_or(0, char::len_utf8)));
                self.out.push_str(scalar);
            }
            None => {}
        }
    }

    /// An object or an array.
    fn members(&mut self, open: char, close: char) {
        self.take(1);
        self.out.push(open);
        let mut count = 0;
        while let Some(next) = self.peek().filter(|next| *next != close) {
            if next == ',' {
                self.take(1);
                continue;
            }
            self.out.push_str(if count == 0 { "\n" } else { ",\n" });
            if open == '{' && next == '"' {
                let name = self.string();
                self.keys.push(Key::Name(serde_json::from_str(name).unwrap_or_default()));
                self.indentation(0);
                self.out.push_str(name);
                self.out.push_str(": ");
                if self.peek() == Some(':') {
                    self.take(1);
                }
            } else {
                self.keys.push(Key::Item(count));
                self.indentation(0);
            }
            self.value();
            self.keys.pop();
            count += 1;
        }
        self.take(self.rest.chars().next().map_or(0, char::len_utf8));
        if count > 0 {
            self.out.push('\n');
            self.indentation(0);
        }
        self.out.push(close);
    }

    fn indentation(&mut self, extra: usize) {
        self.out.extend(std::iter::repeat_n("  ", self.keys.len() + extra));
    }

    /// A string with its quotes.
    fn string(&mut self) -> &'t str {
        let mut is_escaped = false;
        let end = self.rest.char_indices().skip(1).find(|(_, c)| {
            let is_end = *c == '"' && !is_escaped;
            is_escaped = *c == '\\' && !is_escaped;
            is_end
        });
        self.take(end.map_or(self.rest.len(), |(i, _)| i + 1))
    }

    /// Moves past a value without writing it.
    fn skip(&mut self) {
        let written = self.out.len();
        let hidden = std::mem::take(&mut self.hidden);
        self.value();
        self.hidden = hidden;
        self.out.truncate(written);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_indented_and_nothing_else_changes() {
        let text = r#"{"id":9223372036854775808,"x":1.10e+2,"s":"a\"},[b\\","list":[1,{"y":null}],"none":{},"empty":[]}"#;
        let expected = r#"{
  "id": 9223372036854775808,
  "x": 1.10e+2,
  "s": "a\"},[b\\",
  "list": [
    1,
    {
      "y": null
    }
  ],
  "none": {},
  "empty": []
}"#;
        assert_eq!(indent(text, &[]).as_deref(), Some(expected));
        assert_eq!(indent(expected, &[]).as_deref(), Some(expected), "indented text stays as it is");
        for scalar in ["null", "1e400", "-0", "\"é\"", " true "] {
            assert_eq!(indent(scalar, &[]).as_deref(), Some(scalar.trim()));
        }
    }

    #[test]
    fn hidden_paths_are_replaced_at_any_depth() {
        let hidden = ["password", "cards.*.number", "deep"].map(Path::new);
        let text =
            r#"{"password":"p","cards":[{"number":"4111","name":"Ada"}],"deep":{"a":[1,2]},"number":"5"}"#;
        let shown = indent(text, &hidden).unwrap();
        assert!(!shown.contains("\"p\"") && !shown.contains("4111") && !shown.contains("\"a\""), "{shown}");
        assert!(shown.contains("\"name\": \"Ada\"") && shown.contains("\"number\": \"5\""), "{shown}");
        assert_eq!(shown.matches(HIDDEN).count(), 3);
        let value: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!(value["deep"], HIDDEN);
    }

    #[test]
    fn a_key_in_another_spelling_is_hidden_too() {
        let shown = indent(r#"{"p\u0061ssword":"secret"}"#, &[Path::new("password")]).unwrap();
        assert!(!shown.contains("secret"), "{shown}");
    }

    #[test]
    fn a_text_that_becomes_too_long_is_not_indented() {
        let nested = format!("{}{}1{}", "[".repeat(60), "1,".repeat(400_000), "]".repeat(60));
        assert_eq!(indent(&nested, &[]), None);
        let hidden = format!(r#"{{"password":"{}","x":1}}"#, "p".repeat(2 * MAX_INDENTED));
        assert_eq!(indent(&hidden, &[]), None);
        let shown = indent(&hidden, &[Path::new("password")]).unwrap();
        assert!(
            shown.contains(HIDDEN) && shown.contains("\"x\": 1"),
            "what is hidden does not count: {shown}"
        );
        let hidden = format!(r#"{{"password":{nested},"x":1}}"#);
        assert_eq!(indent(&hidden, &[Path::new("password")]), None);
    }

    #[test]
    fn the_beginning_of_a_value_has_no_hidden_values() {
        assert_eq!(beginning(r#"{"a":1,"b":2}"#, &[], 6), r#"{"a":1…"#);
        let shown = beginning(r#"{"password":"secret","b":2}"#, &[Path::new("password")], 99);
        assert_eq!(shown, format!(r#"{{ "password": "{HIDDEN}", "b": 2 }}"#));
    }

    #[test]
    fn text_that_is_not_json_does_not_hang() {
        for text in ["", "{", "[1,", "{\"a\"", "}", "]", "[}", "\"", "{:}"] {
            indent(text, &[Path::new("a")]);
        }
    }
}
