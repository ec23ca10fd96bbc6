//! Each layer of the library uses only itself and those below it.
//!
//! The test reads the paths that start with `crate::` in every file, and fails on one that leads upwards. A name at the
//! root of the crate counts as the module that `lib.rs` exports it from. Unit tests may use everything.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of each layer, the lowest first.
const LAYERS: [&[&str]; 5] = [
    &["catch_panic", "error", "job", "json_schema", "nearest", "network", "private_file", "rules", "trace"],
    &["store"],
    &["client"],
    &["worker"],
    &["api", "builtin", "dashboard", "testing"],
];

#[test]
fn each_layer_uses_only_those_below_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let exports = exports(&code(&root.join("lib.rs")));
    let files = files(&root);
    assert!(files.len() > 100, "{} files", files.len());
    let mut upward = Vec::new();
    for file in files.iter().filter(|file| !file.ends_with("lib.rs")) {
        let name = file.strip_prefix(&root).expect("a file of the crate").display().to_string();
        let module = name.split(['/', '.']).next().unwrap_or_default();
        let own = layer(module).unwrap_or_else(|| panic!("{name}: add the module to LAYERS"));
        for used in used_modules(&code(file)) {
            let target = exports.get(&used).unwrap_or(&used);
            if layer(target).is_some_and(|target| target > own) {
                upward.push(format!("{name} uses crate::{used}, which is in a layer above"));
            }
        }
    }
    assert!(upward.is_empty(), "{}", upward.join("\n"));
}

#[test]
fn paths_are_found_wherever_they_are_written() {
    let code = "use crate::{client::Client, error::{Error, Result}, Worker};\n\
                use crate::store::{self, Lease};\nfn f() -> crate::Result<()> { crate::api::serve() }";
    assert_eq!(used_modules(code), ["client", "error", "Worker", "store", "Result", "api"]);
    let exports =
        exports("pub use client::{Client, schedules::{self as cron, CronLine}};\npub use error::Result;");
    for (name, module) in
        [("Client", "client"), ("cron", "client"), ("CronLine", "client"), ("Result", "error")]
    {
        assert_eq!(exports.get(name).map(String::as_str), Some(module), "{name}");
    }
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|modules| modules.contains(&module))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("read a folder") {
        let path = entry.expect("read an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The code of a file without comments and without its unit tests, which are at its end.
fn code(file: &Path) -> String {
    let text = fs::read_to_string(file).expect("read a file");
    let lines: Vec<&str> = text.lines().collect();
    let is_tests = |pair: &[&str]| {
        pair[0].starts_with("#[cfg(") && pair[0].contains("test") && pair[1].starts_with("mod ")
    };
    let end = lines.windows(2).position(is_tests).unwrap_or(lines.len());
    let code = lines[..end].iter().filter(|line| !line.trim_start().starts_with("//"));
    code.map(|line| format!("{line}\n")).collect()
}

/// The first name of each path that starts with `crate::`, in order.
fn used_modules(code: &str) -> Vec<String> {
    let mut used = Vec::new();
    for (at, path) in code.match_indices("crate::") {
        if code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_' || before == '$') {
            continue;
        }
        let rest = &code[at + path.len()..];
        match rest.strip_prefix('{') {
            Some(group) => used.extend(items(group).iter().map(|item| first_name(item))),
            None => used.push(first_name(rest)),
        }
    }
    used
}

/// The names that `lib.rs` exports, with the module that each comes from.
fn exports(lib: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for statement in lib.split("pub use ").skip(1) {
        let path = statement.split(';').next().unwrap_or_default();
        let module = first_name(path);
        for name in exported_names(path) {
            found.insert(name, module.clone());
        }
    }
    found
}

fn exported_names(path: &str) -> Vec<String> {
    match path.split_once('{') {
        Some((_, group)) => items(group).iter().flat_map(|item| exported_names(item)).collect(),
        None => {
            let name = path.rsplit(" as ").next().unwrap_or_default();
            vec![name.rsplit("::").next().unwrap_or_default().trim().to_owned()]
        }
    }
}

/// The items of a group, up to the brace that closes it.
fn items(group: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut depth = 0;
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                items.push(String::new());
                continue;
            }
            _ => {}
        }
        if let Some(item) = items.last_mut() {
            item.push(c);
        }
    }
    items.into_iter().map(|item| item.trim().to_owned()).filter(|item| !item.is_empty()).collect()
}

fn first_name(path: &str) -> String {
    path.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}
