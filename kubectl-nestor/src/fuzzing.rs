//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use serde_json::{Value, json};

use crate::bundle::redact;
use crate::config;

/// A JSON Web Token.
const TOKEN: &str = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJndWVzdCJ9.c2lnbmF0dXJl";

/// The configuration file.
pub fn plugin_config(data: &[u8]) {
    if let Err(reason) = config::parse(&String::from_utf8_lossy(data)) {
        assert!(!reason.is_empty());
    }
}

/// Logs and objects of support bundles, with a token among them: it is removed, and a second pass finds nothing more.
pub fn redaction(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    for line in [format!("{text}{TOKEN}{text}"), format!("{text} Authorization: Bearer s3cr3t\n{text}")] {
        let shown = redact::log(&line);
        assert!(!shown.contains(TOKEN) && (text.contains("s3cr3t") || !shown.contains("s3cr3t")), "{shown}");
        assert_eq!(redact::log(&shown), shown);
    }
    if let Ok(object) = serde_json::from_slice::<Value>(data) {
        let shown = redact::items(vec![json!({"spec": object, "data": {"token": "s3cr3t", "x": TOKEN}})]);
        assert!(!shown[0]["data"].to_string().contains("s3cr3t") && !shown[0].to_string().contains(TOKEN));
        assert_eq!(redact::items(shown.clone()), shown);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn plugin_config() {
        fuzz_kit::replay("plugin_config", super::plugin_config);
    }

    #[test]
    fn redaction() {
        fuzz_kit::replay("redaction", super::redaction);
    }
}
