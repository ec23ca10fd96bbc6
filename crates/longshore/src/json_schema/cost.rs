//! How much work a JSON Schema causes: what is known from the schema alone, and what one payload adds.
//!
//! Schemas come from anybody who may announce a kind, and a small one can describe an endless amount of work. So a schema
//! is refused if compiling it or checking one value against it may cost too much, and every payload is measured before
//! it is checked. Both are counted and not timed, so the result is the same on every machine.
//!
//! This module knows which keywords apply which subschemas to what. Whether a value matches is decided by `jsonschema`.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

/// The maximum size of a schema, in bytes of JSON.
const MAX_BYTES: usize = crate::store::MAX_SCHEMA;
/// The maximum number of levels of objects and arrays in a schema.
const MAX_LEVELS: usize = 64;
/// The maximum number of `$ref`.
const MAX_REFS: usize = 1_000;
/// The maximum number of subschemas with an `$id` of their own. `jsonschema` compiles a schema once per path between them.
const MAX_IDS: usize = 4;
/// The maximum number of subschemas that apply to one value of a payload, counted once per way to reach them.
const MAX_FAN_OUT: u64 = 4_096;
/// The maximum number of subschemas on the way to one that applies to the same value.
const MAX_CHAIN: usize = 64;
/// The maximum number of subschemas to compile, counted once per time they are compiled.
const MAX_COMPILED: u64 = 20_000;
/// What a subschema costs that `unevaluatedProperties` or `unevaluatedItems` compiles again.
const COMPILED_AGAIN: u64 = 8;
/// The maximum weight of all regular expressions.
const MAX_PATTERNS: u64 = 20_000;
/// The maximum size of a compiled regular expression, in bytes of memory.
pub(super) const MAX_PATTERN: usize = 512 * 1024;
/// The maximum size of the cache of its matches, which fills as it is used.
pub(super) const MAX_MATCHES: usize = 32 * 1024;
/// The maximum size of all different regular expressions, compiled and with their caches, as it is estimated.
const MAX_KEPT_PATTERNS: usize = 32 * 1024 * 1024;
/// How many bytes of a regular expression `jsonschema` reads again at the cost of one unit of its weight.
const READ_AGAIN: u64 = 50;
/// The maximum depth of subschemas and values of a payload together.
const MAX_DEPTH: usize = 512;
/// `jsonschema` remembers the result of a `$ref` only if finding it took this many.
const REMEMBERED_AFTER: u64 = 16;

/// Why a payload is not checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Excess {
    Steps,
    Depth,
}

/// What a check of one payload costs, as it is counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cost {
    pub(super) steps: u64,
    pub(super) depth: usize,
}

/// Whether results of the same subschema for the same value are counted once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Repeated {
    /// As in `is_valid`.
    Once,
    /// As in the search for the first error. A branch that fails is visited again on every level above it.
    Always,
}

/// The parts of a schema that apply subschemas.
pub(super) struct Outline {
    nodes: Vec<Node>,
    /// Whether a failure collects the errors of several branches.
    pub(super) collects: bool,
    /// What its regular expressions take when they are compiled, in bytes.
    pub(super) patterns: usize,
}

/// A subschema. The numbers are indexes of other ones.
#[derive(Default)]
struct Node {
    /// The steps of its own keywords.
    own: u64,
    /// The weight of its regular expressions for values.
    pattern: u64,
    /// Those that apply to the same value, without `$ref`.
    same: Vec<usize>,
    /// The targets of `$ref`.
    refs: Vec<usize>,
    collects: bool,
    /// Whether it has `unevaluatedProperties` or `unevaluatedItems`.
    marks: bool,
    unique_items: bool,
    properties: HashMap<String, usize>,
    other_properties: Option<usize>,
    each_property: Vec<usize>,
    /// The weight of the patterns for names.
    name_pattern: u64,
    names: Option<usize>,
    positions: Vec<usize>,
    other_items: Vec<usize>,
    each_item: Vec<usize>,
    /// The strongly connected component; subschemas of one component reach each other.
    component: usize,
    /// Whether `jsonschema` remembers its results: it is the only target of a `$ref` within its component, so every
    /// cycle passes it.
    remembered: bool,
    /// The subschemas that are visited from here until a remembered one.
    unfolded: u64,
}

impl Node {
    /// The subschemas below it in the text.
    fn parts(&self) -> impl Iterator<Item = usize> {
        self.same.iter().copied().chain(self.children())
    }

    /// The subschemas for parts of the value.
    fn children(&self) -> impl Iterator<Item = usize> {
        let lists = [&self.each_property, &self.positions, &self.other_items, &self.each_item];
        let single = self.other_properties.into_iter().chain(self.names);
        self.properties.values().copied().chain(single).chain(lists.into_iter().flatten().copied())
    }
}

impl Outline {
    /// Reads a schema, or returns why it would cost too much.
    pub(super) fn of(text: &str, schema: &Value) -> Result<Self, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("has {} bytes; use at most {MAX_BYTES}", text.len()));
        }
        let mut document =
            Document { root: schema, anchors: Vec::new(), ids: Vec::new(), refs: HashMap::new() };
        document.scan(schema, Place::Schema, &mut Vec::new(), 0)?;
        document.check()?;
        let (nodes, patterns) = Builder::new(&document).build()?;
        let mut outline = Outline { collects: nodes.iter().any(|node| node.collects), patterns, nodes };
        outline.check_fan_out()?;
        outline.check_compiled()?;
        outline.find_remembered();
        Ok(outline)
    }

    /// The cost of a check, unless it exceeds `max_steps`.
    pub(super) fn measure(&self, value: &Value, max_steps: u64, repeated: Repeated) -> Result<Cost, Excess> {
        let mut meter =
            Meter { nodes: &self.nodes, left: max_steps, depth: 0, repeated, known: HashMap::new() };
        meter.visit(0, value, 0, 1)?;
        Ok(Cost { steps: max_steps - meter.left, depth: meter.depth })
    }

    /// Refuses a subschema that applies itself to the same value, and too many that apply to one value.
    fn check_fan_out(&self) -> Result<(), String> {
        #[derive(Clone, Copy)]
        enum Seen {
            Entered,
            Left { fan_out: u64, chain: usize },
        }
        fn visit(nodes: &[Node], n: usize, seen: &mut [Option<Seen>]) -> Result<(u64, usize), String> {
            match seen[n] {
                Some(Seen::Left { fan_out, chain }) => return Ok((fan_out, chain)),
                Some(Seen::Entered) => {
                    return Err(
                        "a `$ref` leads back to itself without entering a property or an item; remove \
                                the loop"
                            .into(),
                    );
                }
                None => seen[n] = Some(Seen::Entered),
            }
            let (mut fan_out, mut chain) = (1_u64, 0);
            for &next in nodes[n].same.iter().chain(&nodes[n].refs) {
                let below = visit(nodes, next, seen)?;
                fan_out = fan_out.saturating_add(below.0);
                chain = chain.max(below.1);
            }
            chain += 1;
            if fan_out > MAX_FAN_OUT {
                return Err(format!(
                    "more than {MAX_FAN_OUT} subschemas apply to one value; use fewer branches of `allOf`, \
                     `anyOf` and `oneOf`"
                ));
            }
            if chain > MAX_CHAIN {
                return Err(format!(
                    "more than {MAX_CHAIN} nested subschemas apply to one value; nest less, and shorten \
                     chains of `$ref`"
                ));
            }
            seen[n] = Some(Seen::Left { fan_out, chain });
            Ok((fan_out, chain))
        }
        let mut seen = vec![None; self.nodes.len()];
        (0..self.nodes.len()).try_for_each(|n| visit(&self.nodes, n, &mut seen).map(drop))
    }

    /// Refuses a schema that `jsonschema` would expand too far when it compiles it.
    fn check_compiled(&self) -> Result<(), String> {
        struct Compiled<'n>(&'n [Node], u64);
        impl Compiled<'_> {
            fn add(&mut self, cost: u64) -> Option<()> {
                self.1 = self.1.checked_sub(cost)?;
                Some(())
            }

            fn compile(&mut self, n: usize) -> Option<()> {
                self.add(1)?;
                let nodes = self.0;
                nodes[n].parts().try_for_each(|part| self.compile(part))?;
                if nodes[n].marks { self.mark(n) } else { Some(()) }
            }

            fn mark(&mut self, n: usize) -> Option<()> {
                self.add(COMPILED_AGAIN)?;
                let nodes = self.0;
                for &part in &nodes[n].same {
                    self.compile(part)?;
                    self.mark(part)?;
                }
                nodes[n].refs.iter().try_for_each(|&target| self.mark(target))
            }
        }
        let mut compiled = Compiled(&self.nodes, MAX_COMPILED);
        let targets: HashSet<usize> = self.nodes.iter().flat_map(|node| node.refs.iter().copied()).collect();
        let within = std::iter::once(0).chain(targets).try_for_each(|n| compiled.compile(n));
        within.ok_or_else(|| {
            "it is too large when `unevaluatedProperties` and `unevaluatedItems` are expanded; use them on fewer levels".into()
        })
    }

    /// Finds which results `jsonschema` remembers.
    fn find_remembered(&mut self) {
        let components = components(&self.nodes);
        let mut targets: HashMap<usize, HashSet<usize>> = HashMap::new();
        for (n, node) in self.nodes.iter().enumerate() {
            for &target in node.refs.iter().filter(|target| components[**target] == components[n]) {
                targets.entry(components[n]).or_default().insert(target);
            }
        }
        for (n, node) in self.nodes.iter_mut().enumerate() {
            node.component = components[n];
            let within = targets.get(&components[n]);
            node.remembered = within.is_some_and(|targets| targets.len() == 1 && targets.contains(&n));
        }
        for n in 0..self.nodes.len() {
            if self.nodes[n].remembered {
                self.nodes[n].unfolded = self.unfolded(n, n, &mut HashMap::new());
            }
        }
    }

    fn unfolded(&self, n: usize, from: usize, known: &mut HashMap<usize, u64>) -> u64 {
        if let Some(found) = known.get(&n) {
            return *found;
        }
        // A cycle that does not pass `from` ends here.
        known.insert(n, 1);
        let node = &self.nodes[n];
        let next = node.parts().chain(node.refs.iter().copied()).filter(|next| *next != from);
        let below: Vec<usize> = next.collect();
        let sum = below
            .into_iter()
            .fold(node.own, |sum, next| sum.saturating_add(self.unfolded(next, from, known)));
        known.insert(n, sum);
        sum
    }
}

/// The strongly connected component of each subschema, by Tarjan's algorithm.
fn components(nodes: &[Node]) -> Vec<usize> {
    struct Search<'n> {
        nodes: &'n [Node],
        order: Vec<Option<usize>>,
        low: Vec<usize>,
        stack: Vec<usize>,
        component: Vec<Option<usize>>,
        next: usize,
    }
    impl Search<'_> {
        fn visit(&mut self, n: usize) {
            self.order[n] = Some(self.next);
            self.low[n] = self.next;
            self.next += 1;
            self.stack.push(n);
            let nodes = self.nodes;
            for next in nodes[n].parts().chain(nodes[n].refs.iter().copied()) {
                match self.order[next] {
                    None => {
                        self.visit(next);
                        self.low[n] = self.low[n].min(self.low[next]);
                    }
                    Some(order) if self.component[next].is_none() => self.low[n] = self.low[n].min(order),
                    Some(_) => {}
                }
            }
            if Some(self.low[n]) == self.order[n] {
                while let Some(member) = self.stack.pop() {
                    self.component[member] = Some(n);
                    if member == n {
                        break;
                    }
                }
            }
        }
    }
    let len = nodes.len();
    let mut search = Search {
        nodes,
        order: vec![None; len],
        low: vec![0; len],
        stack: Vec::new(),
        component: vec![None; len],
        next: 0,
    };
    for n in 0..len {
        if search.order[n].is_none() {
            search.visit(n);
        }
    }
    search.component.into_iter().enumerate().map(|(n, found)| found.unwrap_or(n)).collect()
}

/// Counts the steps of a check.
struct Meter<'n> {
    nodes: &'n [Node],
    left: u64,
    depth: usize,
    repeated: Repeated,
    /// The steps of the first visit, by subschema and the address of the value.
    known: HashMap<(usize, usize), u64>,
}

impl Meter<'_> {
    fn charge(&mut self, steps: u64) -> Result<(), Excess> {
        self.left = self.left.checked_sub(steps).ok_or(Excess::Steps)?;
        Ok(())
    }

    /// `times` says how often the search for the first error visits this value.
    fn visit(&mut self, n: usize, value: &Value, depth: usize, times: u64) -> Result<(), Excess> {
        self.depth = self.depth.max(depth);
        if depth > MAX_DEPTH {
            return Err(Excess::Depth);
        }
        let node = &self.nodes[n];
        self.charge(times * (1 + node.own + text_cost(value, node.pattern)))?;
        if let Some(items) = value.as_array().filter(|_| node.unique_items) {
            self.charge(times.saturating_mul(size(value)))?;
            self.charge(times.saturating_mul(comparisons(items)))?;
        }
        let times = times + u64::from(node.collects && self.repeated == Repeated::Always);
        for &same in &node.same {
            self.visit(same, value, depth + 1, times)?;
        }
        for &target in &node.refs {
            self.follow(n, target, value, depth + 1, times)?;
        }
        if node.marks {
            self.mark(n, value, depth + 1, times)?;
        }
        match value {
            Value::Object(members) => {
                for (name, member) in members {
                    let known = node.properties.get(name).copied();
                    let other = node.other_properties.filter(|_| known.is_none());
                    self.charge(times * (1 + pattern_cost(name.len(), node.name_pattern)))?;
                    for next in known.into_iter().chain(other).chain(node.each_property.iter().copied()) {
                        self.visit(next, member, depth + 1, times)?;
                    }
                    if let Some(names) = node.names {
                        self.visit(names, &Value::String(name.clone()), depth + 1, times)?;
                    }
                }
            }
            Value::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    let position = node.positions.get(i).copied();
                    let others = if position.is_none() { node.other_items.as_slice() } else { &[] };
                    for &next in position.iter().chain(others).chain(&node.each_item) {
                        self.visit(next, item, depth + 1, times)?;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Visits the target of a `$ref`.
    fn follow(
        &mut self,
        from: usize,
        target: usize,
        value: &Value,
        depth: usize,
        times: u64,
    ) -> Result<(), Excess> {
        let node = &self.nodes[target];
        let is_remembered = node.remembered
            && node.component == self.nodes[from].component
            && self.repeated == Repeated::Once
            && (value.is_array() || value.is_object());
        if !is_remembered {
            return self.visit(target, value, depth, times);
        }
        let key = (target, std::ptr::from_ref(value) as usize);
        if let Some(first) = self.known.get(&key) {
            return self.charge((*first).min(REMEMBERED_AFTER.saturating_mul(node.unfolded)));
        }
        let before = self.left;
        self.visit(target, value, depth, times)?;
        self.known.insert(key, before - self.left);
        Ok(())
    }

    /// Visits what `unevaluatedProperties` and `unevaluatedItems` visit again.
    fn mark(&mut self, n: usize, value: &Value, depth: usize, times: u64) -> Result<(), Excess> {
        if depth > MAX_DEPTH {
            return Err(Excess::Depth);
        }
        self.charge(times * (1 + size_of_top(value)))?;
        let node = &self.nodes[n];
        for &same in &node.same {
            self.visit(same, value, depth + 1, times)?;
            self.mark(same, value, depth + 1, times)?;
        }
        node.refs.iter().try_for_each(|&target| self.mark(target, value, depth + 1, times))
    }
}

/// The steps of reading a text, and of matching it against patterns of this weight.
fn text_cost(value: &Value, pattern: u64) -> u64 {
    value.as_str().map_or(0, |text| text.len() as u64 / 16 + pattern_cost(text.len(), pattern))
}

/// The steps of matching a text. If the cache of matches is too small, a character takes 3 to 4 ns per unit of weight.
fn pattern_cost(len: usize, pattern: u64) -> u64 {
    (len as u64 + 1).saturating_mul(pattern) / 16
}

/// The number of values in a value, with long texts counted by their length.
fn size(value: &Value) -> u64 {
    match value {
        Value::String(text) => 1 + text.len() as u64 / 16,
        Value::Array(items) => items.iter().map(size).sum::<u64>() + 1,
        Value::Object(members) => {
            members.iter().map(|(name, value)| 1 + name.len() as u64 / 16 + size(value)).sum::<u64>() + 1
        }
        _ => 1,
    }
}

/// The values that `uniqueItems` compares at most. `jsonschema` puts the items into a hash table, and compares those with
/// the same hash. The sender of a payload can choose arrays, objects and numbers so that all hashes are the same: nested
/// arrays hash as their items, and numbers as the nearest floating-point number. Strings have hashes that nobody can
/// predict.
fn comparisons(items: &[Value]) -> u64 {
    let half = |pairs: u64| pairs / 2;
    if items.iter().any(|item| item.is_array() || item.is_object()) {
        return half((items.len() as u64).saturating_mul(items.iter().map(size).sum()));
    }
    let mut alike: HashMap<Option<u64>, u64> = HashMap::new();
    for number in items.iter().filter_map(Value::as_number) {
        *alike.entry(number.as_f64().map(f64::to_bits)).or_default() += 1;
    }
    alike.into_values().map(|count| half(count.saturating_mul(count - 1))).fold(0, u64::saturating_add)
}

fn size_of_top(value: &Value) -> u64 {
    match value {
        Value::Array(items) => items.len() as u64,
        Value::Object(members) => members.len() as u64,
        _ => 0,
    }
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
