//! URLs of pages: the query string of the request, and links that change parts of it.

use std::fmt::Write;

pub(super) use crate::api::url_parameters::encoded;

/// The parameters of a URL, in order. Empty values are left out: a form sends them for fields that were
/// not filled in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Params(Vec<(String, String)>);

impl Params {
    pub(super) fn new(pairs: Vec<(String, String)>) -> Self {
        let is_set = |(_, value): &(String, String)| !value.is_empty();
        Params(pairs.into_iter().filter(is_set).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Every value of a parameter; each may be a list separated by commas.
    pub(super) fn list(&self, name: &str) -> impl Iterator<Item = &str> {
        let values = self.0.iter().filter(move |(key, _)| key == name);
        values.flat_map(|(_, value)| value.split(',')).map(str::trim).filter(|value| !value.is_empty())
    }

    /// The same without these parameters.
    pub(super) fn without(&self, names: &[&str]) -> Params {
        Params(self.0.iter().filter(|(key, _)| !names.contains(&key.as_str())).cloned().collect())
    }

    /// The same with this value instead of all others of the parameter.
    pub(super) fn with(&self, name: &str, value: impl Into<String>) -> Params {
        let mut params = self.without(&[name]);
        params.0.push((name.to_owned(), value.into()));
        params
    }

    /// The URL of a page with these parameters.
    pub(super) fn url(&self, page: &str) -> String {
        let mut url = page.to_owned();
        for (i, (key, value)) in self.0.iter().enumerate() {
            let separator = if i == 0 { '?' } else { '&' };
            // Writing to a string cannot fail.
            let _ = write!(url, "{separator}{}={}", encoded(key), encoded(value));
        }
        url
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(pairs: &[(&str, &str)]) -> Params {
        Params::new(pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn links_keep_the_other_parameters() {
        let params = params(&[("status", "queued"), ("kind", ""), ("queue", "a b/c"), ("cursor", "1")]);
        assert_eq!(params.get("kind"), None);
        assert_eq!(params.without(&["cursor"]).url("/ui/jobs"), "/ui/jobs?status=queued&queue=a%20b%2Fc");
        assert_eq!(params.with("status", "x").get("status"), Some("x"));
    }

    #[test]
    fn names_keep_their_spaces() {
        let params = params(&[("group", " acme"), ("tag", " ")]);
        assert_eq!((params.get("group"), params.get("tag")), (Some(" acme"), Some(" ")));
        assert_eq!(params.url("/ui/jobs"), "/ui/jobs?group=%20acme&tag=%20");
    }

    #[test]
    fn lists_may_be_repeated_or_separated_by_commas() {
        let params = params(&[("status", "queued,running"), ("status", "retrying")]);
        assert_eq!(params.list("status").collect::<Vec<_>>(), ["queued", "running", "retrying"]);
    }

    #[test]
    fn no_text_ends_an_attribute_or_a_parameter() {
        assert_eq!(encoded("\"><&=?#%é"), "%22%3E%3C%26%3D%3F%23%25%C3%A9");
    }
}
