//! The library's cargo features, read from its manifest rather than listed
//! here: a new feature is checked from the day it is declared.

use std::{collections::BTreeSet, fs};

use crate::run::{self, Result};

/// The ways to build `longshore` that are checked: the name of each and the
/// flags that choose it. Nothing, each feature alone, everything.
pub(crate) fn combinations() -> Result<Vec<(String, Vec<String>)>> {
    let path = run::workspace().join("crates/longshore/Cargo.toml");
    let manifest = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let features = declared(&manifest).map_err(|problem| format!("{}: {problem}", path.display()))?;

    let bare = "--no-default-features".to_string();
    let mut combinations = vec![("no features".to_string(), vec![bare.clone()])];
    for feature in features {
        let flags = vec![bare.clone(), "--features".to_string(), feature.clone()];
        combinations.push((format!("only {feature}"), flags));
    }
    combinations.push(("all features".into(), vec!["--all-features".into()]));
    Ok(combinations)
}

/// The keys of the manifest's `[features]` table but for `default`, which is
/// only a choice among the others.
///
/// Reads as much TOML as the table needs: comments, quoted keys, and arrays
/// over several lines.
fn declared(manifest: &str) -> std::result::Result<BTreeSet<String>, String> {
    let mut features = BTreeSet::new();
    let mut in_table = false;
    let mut in_array = false;
    for line in manifest.lines() {
        // No `#` can occur in a feature's name or in what it enables.
        let line = line.split('#').next().unwrap_or_default().trim();
        if in_array {
            in_array = !line.ends_with(']');
        } else if line.starts_with('[') {
            in_table = line == "[features]";
        } else if in_table && !line.is_empty() {
            let (name, enables) =
                line.split_once('=').ok_or_else(|| format!("cannot read `{line}` in [features]"))?;
            in_array = !enables.trim_end().ends_with(']');
            features.insert(name.trim().trim_matches('"').to_string());
        }
    }
    features.remove("default");
    if features.is_empty() {
        return Err("found no [features] table with features in it".into());
    }
    Ok(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_of_the_table_is_a_feature_and_nothing_else_is() {
        let manifest = r#"
            [package]
            name = "longshore"

            [features]
            default = ["postgres"]
            ## The production engine.
            postgres = ["dep:sqlx"]   # a remark = with an equals sign
            worker = []
            "odd-name" = []
            api = [
                "dep:axum",
                "worker",
            ]

            [dependencies]
            serde = "1"
        "#;
        let features = declared(manifest).expect("the table is well formed");
        assert_eq!(features.into_iter().collect::<Vec<_>>(), ["api", "odd-name", "postgres", "worker"]);
    }

    #[test]
    fn a_manifest_without_features_is_refused_rather_than_passed() {
        assert!(declared("[package]\nname = \"longshore\"\n").is_err());
        assert!(declared("[features]\n[dependencies]\nserde = \"1\"\n").is_err());
    }

    #[test]
    fn the_library_is_checked_with_nothing_each_feature_and_everything() {
        let combinations = combinations().expect("the library's manifest is readable");
        let names: Vec<_> = combinations.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.first(), Some(&"no features"));
        assert!(names.contains(&"only postgres"), "{names:?}");
        assert!(names.contains(&"only sqlite"), "{names:?}");
        assert_eq!(names.last(), Some(&"all features"));
    }
}
