//! How much work a JSON Schema causes: what is known from the schema alone, and what one payload adds.
//!
//! Schemas come from anybody who may announce a kind, and a small one can describe an endless amount of work. So a schema
//! is refused if compiling it or checking one value against it may cost too much, and every payload is measured before
//! it is checked. Both are counted and not timed, so the result is the same on every machine.
//!
//! [`mod@read`] knows which keywords apply which subschemas to what. Whether a value matches is decided by `jsonschema`.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use read::read;

mod read;

/// The maximum size of a schema, in bytes of JSON.
const MAX_BYTES: usize = crate::rules::enqueue::MAX_SCHEMA;
/// The maximum number of subschemas that apply to one value of a payload, counted once per way to reach them.
const MAX_FAN_OUT: u64 = 4_096;
/// The maximum number of subschemas on the way to one that applies to the same value.
const MAX_CHAIN: usize = 64;
/// The maximum number of subschemas to compile, counted once per time they are compiled.
const MAX_COMPILED: u64 = 20_000;
/// What a subschema costs that `unevaluatedProperties` or `unevaluatedItems` compiles again.
const COMPILED_AGAIN: u64 = 8;
/// The maximum size of a compiled regular expression, in bytes of memory.
pub(super) const MAX_PATTERN: usize = 512 * 1024;
/// The maximum size of the cache of its matches, which fills as it is used.
pub(super) const MAX_MATCHES: usize = 32 * 1024;
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
        let (nodes, patterns) = read(schema)?;
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
