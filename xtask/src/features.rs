//! The library's cargo features. They are read from its manifest, so that a new
//! feature is checked as soon as it is declared.

use std::{collections::BTreeSet, fs};

use crate::run::{self, Result};

/// The feature combinations to check `longshore` with, each with a name and its
/// cargo flags: no features, each feature alone, the default, all.
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
    combinations.push(("default features".into(), Vec::new()));
    // Not the same as the lints of the workspace, where the development dependencies enable more features of ours.
    combinations.push(("all features".into(), vec!["--all-features".into()]));
    Ok(combinations)
}

/// The keys of the manifest's `[features]` table except `default`, which only
/// selects among the others.
///
/// Supports the TOML that the table needs: comments, quoted keys, and arrays over
/// several lines.
fn declared(manifest: &str) -> std::result::Result<BTreeSet<String>, String> {
    let mut features = BTreeSet::new();
    let mut in_table = false;
    let mut in_array = false;
    for line in manifest.lines() {
        // Neither the name of a feature nor what it enables can contain `#`.
        let line = line.split('#').next().unwrap_or_default().trim();
        if in_array {
            in_array = !line.ends_with(']');
        } else if line.starts_with('[') {
            in_table = line == "[features]";
        } else if in_table && !line.is_empty() {
            let (name, enables) =
                line.split_once('=').ok_or_else(|| format!("cannot parse `{line}` in [features]"))?;
            in_array = !enables.trim_end().ends_with(']');
            features.insert(name.trim().trim_matches('"').to_string());
        }
    }
    features.remove("default");
    if features.is_empty() {
        return Err("there is no [features] table, or it is empty".into());
    }
    Ok(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_keys_of_the_features_table_are_features() {
        let manifest = r#"
            [package]
            name = "longshore"

            [features]
            default = ["postgres"]
            ## The production engine.
            postgres = ["dep:sqlx"]   # a comment = with an equals sign
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
    fn a_manifest_without_features_is_an_error() {
        assert!(declared("[package]\nname = \"longshore\"\n").is_err());
        assert!(declared("[features]\n[dependencies]\nserde = \"1\"\n").is_err());
    }

    #[test]
    fn the_library_is_checked_with_no_features_each_feature_the_default_and_all() {
        let combinations = combinations().expect("the library's manifest is readable");
        let names: Vec<_> = combinations.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.first(), Some(&"no features"));
        assert!(names.contains(&"only postgres"), "{names:?}");
        assert!(names.contains(&"only sqlite"), "{names:?}");
        assert_eq!(names[names.len() - 2..], ["default features", "all features"]);
    }
}
