//! Reads a schema into numbered subschemas, and says what is too much for that: levels, references and regular expressions.
//! What the subschemas cost is in [`super`].

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::{MAX_MATCHES, MAX_PATTERN, Node, size};

/// The maximum number of levels of objects and arrays in a schema.
const MAX_LEVELS: usize = 64;
/// The maximum number of `$ref`.
const MAX_REFS: usize = 1_000;
/// The maximum number of subschemas with an `$id` of their own. `jsonschema` compiles a schema once per path between them.
const MAX_IDS: usize = 4;
/// The maximum weight of all regular expressions.
const MAX_PATTERNS: u64 = 20_000;
/// The maximum size of all different regular expressions, compiled and with their caches, as it is estimated.
const MAX_KEPT_PATTERNS: usize = 32 * 1024 * 1024;
/// How many bytes of a regular expression `jsonschema` reads again at the cost of one unit of its weight.
const READ_AGAIN: u64 = 50;

/// Returns the subschemas, the first of which is the schema itself, and what the regular expressions take when they are
/// compiled. Fails with a reason if it would cost too much.
pub(super) fn read(schema: &Value) -> Result<(Vec<Node>, usize), String> {
    let mut document = Document { root: schema, anchors: Vec::new(), ids: Vec::new(), refs: HashMap::new() };
    document.scan(schema, Place::Schema, &mut Vec::new(), 0)?;
    document.check()?;
    Builder::new(&document).build()
}

/// How much work a regular expression is per character: its length, with repetitions written out.
fn weight(pattern: &str) -> u64 {
    let (mut sum, mut factor) = (pattern.len() as u64, 1_u64);
    for (at, _) in pattern.match_indices('{') {
        let counts = pattern[at + 1..].split('}').next().unwrap_or_default();
        let count = counts.split(',').filter_map(|count| count.parse().ok()).max().unwrap_or(1_u64);
        // A repeated group repeats what is repeated in it.
        if pattern[..at].ends_with(')') {
            factor = factor.saturating_mul(count.max(1));
        } else {
            sum = sum.saturating_add(count);
        }
    }
    sum.saturating_mul(factor)
}

/// What a regular expression takes when it is compiled, in bytes: it is compiled for both directions, and each has a cache
/// of its matches. What is not a plain character becomes a machine that reads UTF-8, of about 1 KiB, or 40 KiB for a
/// class of Unicode.
fn kept(pattern: &str) -> usize {
    let has = |parts: &[&str]| parts.iter().any(|part| pattern.contains(part));
    let per_weight = if has(&["\\p", "\\P"]) {
        48 * 1024
    } else if !pattern.is_ascii() || has(&[".", "[^", "(?", "\\S", "\\D", "\\W", "\\s", "\\u", "\\x"]) {
        1024
    } else {
        160
    };
    let compiled = usize::try_from(weight(pattern)).unwrap_or(usize::MAX).saturating_mul(per_weight);
    2 * (compiled.min(MAX_PATTERN) + MAX_MATCHES)
}

/// How much work it is to translate a regular expression for the engine: `jsonschema` replaces one `\c`, `\d`, `\s` or `\w`
/// at a time, and then reads all of it again. What replaces them is longer.
fn translation(pattern: &str) -> u64 {
    let (mut len, mut again) = (pattern.len() as u64, 0_u64);
    let mut chars = pattern.chars();
    while let Some(char) = chars.next() {
        if char != '\\' {
            continue;
        }
        // The character after the backslash is consumed, so the second half of `\\` starts nothing.
        let longer = match chars.next() {
            Some('c') => 0,
            Some('d' | 'D') => 4,
            Some('w' | 'W') => 12,
            // A class of ten ranges.
            Some('s' | 'S') => 170,
            _ => continue,
        };
        again += 1;
        len += longer;
    }
    again.saturating_mul(len) / READ_AGAIN
}

/// What an object of the document is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Schema,
    /// A map of names to schemas.
    Names,
}

/// What a `$ref` can refer to.
struct Document<'s> {
    root: &'s Value,
    /// The names of subschemas.
    anchors: Vec<(&'s str, &'s Value)>,
    /// The subschemas with an `$id`.
    ids: Vec<(&'s str, &'s Value)>,
    /// The text of each `$ref` and the subschemas with an `$id` around it, by the address of the subschema.
    refs: HashMap<usize, (&'s str, Vec<&'s Value>)>,
}

impl<'s> Document<'s> {
    fn scan(
        &mut self,
        value: &'s Value,
        place: Place,
        around: &mut Vec<&'s Value>,
        level: usize,
    ) -> Result<(), String> {
        if level > MAX_LEVELS {
            return Err(format!("has more than {MAX_LEVELS} levels; nest less"));
        }
        let members = match value {
            Value::Array(items) => {
                return items.iter().try_for_each(|item| self.scan(item, place, around, level + 1));
            }
            Value::Object(members) => members,
            _ => return Ok(()),
        };
        if place == Place::Names {
            return members.values().try_for_each(|value| self.scan(value, Place::Schema, around, level + 1));
        }
        let mut is_resource = false;
        // Draft 4 calls it `id`.
        for id in ["$id", "id"].into_iter().filter_map(|name| members.get(name)?.as_str()) {
            match id.strip_prefix('#') {
                Some(anchor) => self.anchors.push((anchor, value)),
                None => {
                    is_resource = true;
                    self.ids.push((id, value));
                }
            }
        }
        for name in ["$anchor", "$dynamicAnchor"] {
            if let Some(anchor) = members.get(name).and_then(Value::as_str) {
                self.anchors.push((anchor, value));
            }
        }
        if is_resource {
            around.push(value);
        }
        if let Some(reference) = members.get("$ref").and_then(Value::as_str) {
            let mut bases = around.clone();
            bases.push(self.root);
            self.refs.insert(address(value), (reference, bases));
        }
        for (keyword, member) in members {
            let place = match keyword.as_str() {
                "const" | "enum" | "default" | "example" | "examples" => continue,
                "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas"
                | "dependencies" => Place::Names,
                _ => Place::Schema,
            };
            self.scan(member, place, around, level + 1)?;
        }
        if is_resource {
            around.pop();
        }
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        if self.refs.len() > MAX_REFS {
            return Err(format!("has {} `$ref`; use at most {MAX_REFS}", self.refs.len()));
        }
        let embedded = self.ids.iter().filter(|(_, value)| !std::ptr::eq(*value, self.root));
        if embedded.count() > MAX_IDS {
            return Err(format!(
                "has more than {MAX_IDS} subschemas with an `$id`; put them under `$defs`, and refer to them \
                 with `#/$defs/NAME`"
            ));
        }
        Ok(())
    }

    /// What the `$ref` of a subschema may refer to. The rules depend on the draft, so there can be several.
    fn targets(&self, value: &Value) -> Result<Vec<&'s Value>, String> {
        let Some(reference) = value.get("$ref").filter(|reference| reference.is_string()) else {
            return Ok(Vec::new());
        };
        let Some((reference, bases)) = self.refs.get(&address(value)) else {
            return Err(format!(
                "`$ref` {reference} is in a value and not in a schema; move the schema to `$defs`"
            ));
        };
        let (document, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let bases: Vec<&Value> = match document {
            "" => bases.clone(),
            document => self
                .ids
                .iter()
                .filter(|(id, _)| is_same_name(id, document))
                .map(|(_, value)| *value)
                .collect(),
        };
        let fragment = percent_decoded(fragment);
        let found: Vec<&Value> = if fragment.is_empty() || fragment.starts_with('/') {
            bases.into_iter().filter_map(|base| base.pointer(&fragment)).collect()
        } else {
            self.anchors.iter().filter(|(anchor, _)| *anchor == fragment).map(|(_, value)| *value).collect()
        };
        let mut known = HashSet::new();
        let found: Vec<&Value> = found.into_iter().filter(|value| known.insert(address(value))).collect();
        if found.is_empty() {
            let reference = &reference[..reference.floor_char_boundary(100)];
            return Err(format!(
                "`$ref` refers to `{reference}`, which is not in the schema; copy it to `$defs`, and refer to it with `#/$defs/NAME`"
            ));
        }
        Ok(found)
    }
}

fn address(value: &Value) -> usize {
    std::ptr::from_ref(value) as usize
}

/// Whether a relative or an absolute reference may mean this identifier.
fn is_same_name(id: &str, reference: &str) -> bool {
    let last = |text: &str| {
        let text = text.split('#').next().unwrap_or_default();
        text.rsplit('/').next().unwrap_or_default().to_ascii_lowercase()
    };
    let is_plain = |text: &str| !text.contains(['%', '?']) && !text.ends_with(['/', '.']);
    is_plain(id) && is_plain(reference) && last(id) == last(reference)
}

fn percent_decoded(text: &str) -> String {
    let (mut decoded, mut rest) = (Vec::new(), text.as_bytes());
    while let [byte, after @ ..] = rest {
        let code =
            after.get(..2).and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        match code.filter(|_| *byte == b'%') {
            Some(code) => {
                decoded.push(code);
                rest = &after[2..];
            }
            None => {
                decoded.push(*byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// Turns a schema into numbered subschemas.
struct Builder<'d, 's> {
    document: &'d Document<'s>,
    numbers: HashMap<usize, usize>,
    /// In the order of their numbers.
    found: Vec<&'s Value>,
    /// The weight of all regular expressions.
    weight: u64,
    patterns: HashSet<&'s str>,
}

impl<'d, 's> Builder<'d, 's> {
    fn new(document: &'d Document<'s>) -> Self {
        Builder { document, numbers: HashMap::new(), found: Vec::new(), weight: 0, patterns: HashSet::new() }
    }

    /// Returns the subschemas, and what the regular expressions take when they are compiled.
    fn build(mut self) -> Result<(Vec<Node>, usize), String> {
        self.number(self.document.root);
        let mut nodes = Vec::new();
        while let Some(value) = self.found.get(nodes.len()).copied() {
            let node = match value {
                Value::Object(members) => self.node(value, members)?,
                _ => Node::default(),
            };
            nodes.push(node);
        }
        if self.weight > MAX_PATTERNS {
            return Err(format!(
                "its regular expressions have a weight of {} (their lengths, with repetitions written out, and more for \
                 many `\\c`, `\\d`, `\\s` and `\\w` in one of them); use at most {MAX_PATTERNS}",
                self.weight
            ));
        }
        let kept = self.patterns.iter().map(|pattern| kept(pattern)).sum();
        if kept > MAX_KEPT_PATTERNS {
            return Err(format!(
                "its {} different regular expressions take up to {kept} bytes when they are compiled; use fewer, so that it \
                 is at most {MAX_KEPT_PATTERNS}",
                self.patterns.len()
            ));
        }
        Ok((nodes, kept))
    }

    fn number(&mut self, value: &'s Value) -> usize {
        *self.numbers.entry(address(value)).or_insert_with(|| {
            self.found.push(value);
            self.found.len() - 1
        })
    }

    fn numbers(&mut self, values: impl IntoIterator<Item = &'s Value>) -> Vec<usize> {
        values.into_iter().map(|value| self.number(value)).collect()
    }

    /// Counts a regular expression. Returns what it costs to match it; to translate it costs only once.
    fn pattern(&mut self, pattern: &'s str) -> u64 {
        let weight = weight(pattern);
        self.weight = self.weight.saturating_add(weight);
        if self.patterns.insert(pattern) {
            self.weight = self.weight.saturating_add(translation(pattern));
        }
        weight
    }

    fn node(&mut self, value: &'s Value, members: &'s Map<String, Value>) -> Result<Node, String> {
        let mut node = Node::default();
        for target in self.document.targets(value)? {
            let target = self.number(target);
            node.refs.push(target);
        }
        for (keyword, value) in members {
            node.own += 1;
            self.keyword(&mut node, keyword, value)?;
        }
        Ok(node)
    }

    fn keyword(&mut self, node: &mut Node, keyword: &str, value: &'s Value) -> Result<(), String> {
        let list = |value: &'s Value| value.as_array().into_iter().flatten();
        let map = |value: &'s Value| value.as_object().into_iter().flatten();
        match keyword {
            "$dynamicRef" | "$recursiveRef" => {
                return Err(format!("`{keyword}` is not supported; use `$ref`"));
            }
            "allOf" => node.same.extend(self.numbers(list(value))),
            "anyOf" | "oneOf" => {
                node.collects = true;
                node.same.extend(self.numbers(list(value)));
            }
            "not" => {
                // An error of this keyword contains the subschema.
                node.own += size(value);
                node.same.push(self.number(value));
            }
            "if" | "then" | "else" => node.same.push(self.number(value)),
            "dependentSchemas" | "dependencies" => {
                node.own += map(value)
                    .map(|(_, value)| value.as_array().map_or(1, |names| size_of_list(names)))
                    .sum::<u64>();
                let schemas = map(value).map(|(_, value)| value).filter(|value| !value.is_array());
                node.same.extend(self.numbers(schemas));
            }
            "properties" => {
                for (name, value) in map(value) {
                    node.own += 1;
                    node.properties.insert(name.clone(), self.number(value));
                }
            }
            "patternProperties" => {
                for (pattern, value) in map(value) {
                    node.name_pattern = node.name_pattern.saturating_add(self.pattern(pattern));
                    node.each_property.push(self.number(value));
                }
            }
            "additionalProperties" => node.other_properties = Some(self.number(value)),
            "unevaluatedProperties" => {
                node.marks = true;
                node.each_property.push(self.number(value));
            }
            "propertyNames" => node.names = Some(self.number(value)),
            "prefixItems" => node.positions.extend(self.numbers(list(value))),
            "items" if value.is_array() => node.positions.extend(self.numbers(list(value))),
            "items" | "additionalItems" => node.other_items.push(self.number(value)),
            "contains" => node.each_item.push(self.number(value)),
            "unevaluatedItems" => {
                node.marks = true;
                node.each_item.push(self.number(value));
            }
            "pattern" => {
                let weight = value.as_str().map_or(0, |pattern| self.pattern(pattern));
                node.pattern = node.pattern.saturating_add(weight);
            }
            "uniqueItems" => node.unique_items = value == &Value::Bool(true),
            "enum" | "const" | "required" | "dependentRequired" => node.own += size(value),
            _ => {}
        }
        Ok(())
    }
}

fn size_of_list(names: &[Value]) -> u64 {
    names.iter().map(size).sum::<u64>() + 1
}
