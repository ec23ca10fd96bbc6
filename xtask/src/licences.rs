//! Checks the licences, the sources and the versions of all dependencies, for every platform, by the rules in
//! `deny.toml`. cargo-deny reads the same file and checks more, but takes many minutes to build.

use std::{collections::BTreeSet, fs};

use crate::run::{self, Result, cargo};

/// Fails if a dependency has a licence that is not allowed, or does not come from crates.io.
pub(crate) fn check() -> Result {
    let rules = Rules::parse(&read("deny.toml")?)?;
    let mut problems = rules.problems(&dependencies()?);
    problems.extend(foreign_sources(&read("Cargo.lock")?));
    for manifest in MANIFESTS {
        problems.extend(wildcards(manifest, &read(manifest)?));
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(format!("the rules in deny.toml are broken:\n  {}", problems.join("\n  ")).into())
}

/// The manifests of the workspace that name versions.
const MANIFESTS: [&str; 5] = [
    "Cargo.toml",
    "crates/bench/Cargo.toml",
    "crates/longshore/Cargo.toml",
    "crates/longshore-cli/Cargo.toml",
    "xtask/Cargo.toml",
];

/// Dependencies that accept any version.
fn wildcards(manifest: &str, text: &str) -> Vec<String> {
    let any = text.lines().filter(|line| line.replace(' ', "").contains("=\"*\""));
    any.map(|line| format!("{manifest}: `{}` accepts any version", line.trim())).collect()
}

fn read(file: &str) -> Result<String> {
    fs::read_to_string(run::workspace().join(file)).map_err(|error| format!("{file}: {error}").into())
}

/// A line for each package that is not one of ours: its name and version, `|`, its licence.
fn dependencies() -> Result<String> {
    let every = ["--workspace", "--all-features", "--target=all", "--edges=normal,build,dev"];
    let mut tree = cargo(["tree", "--locked", "--prefix=none", "--no-dedupe", "--format={p}|{l}"]);
    let output = tree.args(every).output()?;
    if !output.status.success() {
        return Err(format!("cargo tree: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let packages = String::from_utf8_lossy(&output.stdout);
    // A path in parentheses marks a package of the workspace.
    let packages: BTreeSet<&str> = packages.lines().filter(|line| !line.contains("(/")).collect();
    Ok(packages.into_iter().collect::<Vec<_>>().join("\n"))
}

/// Packages that the lock file takes from anywhere else than crates.io.
fn foreign_sources(lock: &str) -> Vec<String> {
    let sources = lock.lines().filter_map(|line| line.strip_prefix("source = "));
    let foreign = sources.filter(|source| !source.contains("crates.io-index"));
    foreign.map(|source| format!("a dependency comes from {source}")).collect()
}

/// The licences that `deny.toml` allows.
#[derive(Debug)]
struct Rules {
    allowed: BTreeSet<String>,
    /// A crate, and the licence that is allowed for it alone.
    exceptions: Vec<(String, String)>,
}

impl Rules {
    /// Supports the TOML that `deny.toml` uses: an array `allow` with one text per line, and
    /// `exceptions` on one line.
    fn parse(text: &str) -> Result<Rules> {
        let (_, after) = text.split_once("\nallow = [").ok_or("deny.toml has no list `allow`")?;
        let (list, _) = after.split_once(']').ok_or("the list `allow` in deny.toml has no end")?;
        let exceptions = text.lines().filter_map(|line| line.strip_prefix("exceptions = "));
        let exceptions = exceptions.flat_map(|line| line.split("crate = ").skip(1)).filter_map(|exception| {
            let quoted = quoted(exception);
            Some((quoted.first()?.clone(), quoted.get(1)?.clone()))
        });
        Ok(Rules { allowed: quoted(list).into_iter().collect(), exceptions: exceptions.collect() })
    }

    fn problems(&self, dependencies: &str) -> Vec<String> {
        let package = |line: &str| -> Option<String> {
            let (package, licence) = line.split_once('|')?;
            let name = package.split(' ').next()?;
            let is_allowed = |licence: &str| {
                let is_exception =
                    |(excepted, allowed): &(String, String)| excepted == name && allowed == licence;
                self.allowed.contains(licence) || self.exceptions.iter().any(is_exception)
            };
            if licence.is_empty() {
                return Some(format!("{package} declares no licence"));
            }
            let is_fine = Expression::new(licence).met_by(&is_allowed);
            (!is_fine).then(|| format!("{package} has the licence `{licence}`, which is not allowed"))
        };
        dependencies.lines().filter_map(package).collect()
    }
}

/// The texts in double quotes.
fn quoted(text: &str) -> Vec<String> {
    text.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

/// An SPDX expression, such as `(MIT OR Apache-2.0) AND Unicode-3.0`. Old packages write `/` for `OR`.
struct Expression {
    words: Vec<String>,
    next: usize,
}

impl Expression {
    fn new(text: &str) -> Expression {
        let spaced = text.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
        Expression { words: spaced.split_whitespace().map(str::to_owned).collect(), next: 0 }
    }

    /// Whether the allowed licences satisfy the whole expression.
    fn met_by(mut self, is_allowed: &dyn Fn(&str) -> bool) -> bool {
        let satisfied = self.any(is_allowed);
        satisfied && self.next == self.words.len()
    }

    /// Alternatives, joined by OR.
    fn any(&mut self, is_allowed: &dyn Fn(&str) -> bool) -> bool {
        let mut satisfied = self.all(is_allowed);
        while self.accept("OR") {
            satisfied |= self.all(is_allowed);
        }
        satisfied
    }

    /// Licences that all apply, joined by AND, which binds tighter than OR.
    fn all(&mut self, is_allowed: &dyn Fn(&str) -> bool) -> bool {
        let mut satisfied = self.one(is_allowed);
        while self.accept("AND") {
            satisfied &= self.one(is_allowed);
        }
        satisfied
    }

    fn one(&mut self, is_allowed: &dyn Fn(&str) -> bool) -> bool {
        if self.accept("(") {
            let satisfied = self.any(is_allowed);
            return self.accept(")") && satisfied;
        }
        let word = self.words.get(self.next).cloned();
        // Beyond the end if there is no word, which makes the whole expression invalid.
        self.next += 1;
        let Some(mut licence) = word else { return false };
        if self.accept("WITH") {
            let exception = self.words.get(self.next).cloned().unwrap_or_default();
            self.next += 1;
            licence = format!("{licence} WITH {exception}");
        }
        is_allowed(&licence)
    }

    fn accept(&mut self, word: &str) -> bool {
        let accepted = self.words.get(self.next).is_some_and(|next| next == word);
        self.next += usize::from(accepted);
        accepted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENY: &str = r#"
[licenses]
# A comment.
allow = [
    "MIT",
    "Unicode-3.0",
]
exceptions = [{ crate = "roots", allow = ["CDLA-Permissive-2.0"] }]
"#;

    fn problems(dependencies: &str) -> Vec<String> {
        Rules::parse(DENY).expect("the rules are well formed").problems(dependencies)
    }

    #[test]
    fn expressions_follow_the_precedence_of_spdx() {
        let is_satisfied =
            |text: &str| Expression::new(text).met_by(&|licence| ["MIT", "ISC"].contains(&licence));
        for fine in
            ["MIT", "GPL-3.0 OR MIT", "GPL-3.0/MIT", "MIT AND ISC", "(MIT OR X) AND ISC", "MIT OR X AND Y"]
        {
            assert!(is_satisfied(fine), "{fine}");
        }
        for wrong in
            ["GPL-3.0", "MIT AND X", "(MIT OR ISC) AND X", "MIT WITH X", "", "MIT ISC", "(MIT", "MIT OR"]
        {
            assert!(!is_satisfied(wrong), "{wrong}");
        }
    }

    #[test]
    fn a_licence_that_is_not_allowed_and_a_missing_one_are_problems() {
        assert_eq!(problems("a v1|MIT\nb v2|MIT/GPL-3.0"), [""; 0]);
        let found = problems("a v1|GPL-3.0\nb v2|");
        assert!(found[0].contains("a v1") && found[0].contains("GPL-3.0"), "{found:?}");
        assert!(found[1].contains("b v2 declares no licence"), "{found:?}");
    }

    #[test]
    fn an_exception_is_for_one_crate() {
        assert_eq!(problems("roots v1|CDLA-Permissive-2.0"), [""; 0]);
        assert_eq!(problems("other v1|CDLA-Permissive-2.0").len(), 1);
    }

    #[test]
    fn a_source_other_than_crates_io_is_a_problem() {
        let lock = "source = \"registry+https://github.com/rust-lang/crates.io-index\"\n";
        assert_eq!(foreign_sources(lock), [""; 0]);
        assert_eq!(foreign_sources(&format!("{lock}source = \"git+https://example.com/x\"\n")).len(), 1);
    }

    #[test]
    fn a_dependency_on_any_version_is_a_problem() {
        assert_eq!(wildcards("Cargo.toml", "a = \"1\"\nb.workspace = true\n"), [""; 0]);
        assert_eq!(wildcards("Cargo.toml", "a = \"*\"\nb = { version = \"*\" }\n").len(), 2);
    }

    #[test]
    fn the_rules_of_the_project_are_read() {
        let rules = Rules::parse(&read("deny.toml").expect("the file exists")).expect("it is well formed");
        assert!(rules.allowed.contains("Apache-2.0") && !rules.exceptions.is_empty(), "{rules:?}");
    }
}
