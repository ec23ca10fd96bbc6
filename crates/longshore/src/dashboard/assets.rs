//! The stylesheet, the script and the icon. Their names contain a hash of their contents, so browsers may
//! keep them forever.

use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

pub(super) static STYLES: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("dashboard", "css", "text/css; charset=utf-8", include_str!("assets/dashboard.css"))
});
pub(super) static SCRIPT: LazyLock<Asset> = LazyLock::new(|| {
    Asset::new("dashboard", "js", "text/javascript; charset=utf-8", include_str!("assets/dashboard.js"))
});
pub(super) static ICON: LazyLock<Asset> =
    LazyLock::new(|| Asset::new("icon", "svg", "image/svg+xml", include_str!("assets/icon.svg")));

pub(super) struct Asset {
    /// The path, from `/ui` on.
    pub(super) path: String,
    content_type: &'static str,
    text: &'static str,
}

impl Asset {
    fn new(name: &str, extension: &str, content_type: &'static str, text: &'static str) -> Self {
        let digest = Sha256::digest(text.as_bytes());
        let hash: String = digest.iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        Asset { path: format!("/ui/assets/{name}-{hash}.{extension}"), content_type, text }
    }
}

pub(super) async fn file(Path(name): Path<String>) -> Response {
    let found = [&STYLES, &SCRIPT, &ICON].into_iter().find(|asset| {
        let path = asset.path.as_str();
        path.rsplit('/').next() == Some(name.as_str())
    });
    match found {
        Some(asset) => {
            let headers = [
                (header::CONTENT_TYPE, asset.content_type),
                (header::CACHE_CONTROL, "public, max-age=31536000, immutable"),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                // An icon that is opened by itself is a page.
                (header::CONTENT_SECURITY_POLICY, super::POLICY),
            ];
            (headers, asset.text).into_response()
        }
        None => (StatusCode::NOT_FOUND, "there is no such file; reload the page\n").into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_and_styles_are_at_most_60_kb() {
        assert!(STYLES.text.len() + SCRIPT.text.len() <= 60_000);
    }

    #[test]
    fn the_files_load_nothing_from_elsewhere() {
        for asset in [&STYLES, &SCRIPT] {
            for forbidden in ["http://", "https://", "@import", "eval(", "innerHTML", "document.write"] {
                assert!(!asset.text.contains(forbidden), "{}: {forbidden}", asset.path);
            }
        }
    }
}
