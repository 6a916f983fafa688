//! Removal of credentials from objects and logs.

use serde_json::{Map, Value, json};

/// What replaces a value.
const REMOVED: &str = "(removed)";
/// Annotations with copies of whole objects.
const COPIES: [&str; 2] =
    ["kubectl.kubernetes.io/last-applied-configuration", "objectset.rio.cattle.io/applied"];
/// Parts of names of fields, flags and environment variables that hold credentials.
const SENSITIVE: [&str; 8] =
    ["token", "password", "passwd", "secret", "privatekey", "private-key", "kubeconfig", "credential"];
/// Fields whose names contain such a part, but only refer to something.
const REFERENCES: [&str; 12] = [
    "secretname",
    "secretref",
    "secretkeyref",
    "secretnamespace",
    "imagepullsecrets",
    "automountserviceaccounttoken",
    "tokenrequests",
    "serviceaccounttoken",
    "nodestagesecretref",
    "nodepublishsecretref",
    "controllerexpandsecretref",
    "controllerpublishsecretref",
];

/// Redacts objects.
pub fn items(items: Vec<Value>) -> Vec<Value> {
    items.into_iter().map(object).collect()
}

fn object(mut object: Value) -> Value {
    if let Some(meta) = object["metadata"].as_object_mut() {
        meta.remove("managedFields");
        if let Some(annotations) = meta.get_mut("annotations").and_then(Value::as_object_mut) {
            COPIES.iter().for_each(|copy| drop(annotations.remove(*copy)));
        }
    }
    redact(&mut object);
    object
}

fn redact(value: &mut Value) {
    match value {
        Value::Object(fields) => fields_of(fields),
        Value::Array(items) => items.iter_mut().for_each(redact),
        Value::String(text) => *text = log(text),
        _ => {}
    }
}

fn fields_of(fields: &mut Map<String, Value>) {
    // An environment variable is named by a field beside its value.
    let named = fields.get("name").and_then(Value::as_str).is_some_and(is_sensitive);
    for (name, value) in fields.iter_mut() {
        let is_value = value.is_string() && (is_sensitive(name) || named && name == "value");
        match is_value {
            true => *value = json!(REMOVED),
            false => redact(value),
        }
    }
}

fn is_sensitive(name: &str) -> bool {
    let name = name.to_lowercase();
    !REFERENCES.contains(&name.as_str()) && SENSITIVE.iter().any(|part| name.contains(part))
}

/// Redacts a text: tokens, keys and certificates, and values of sensitive flags.
pub fn log(text: &str) -> String {
    if !is_suspicious(text) {
        return text.to_owned();
    }
    let mut in_pem = false;
    let lines = text.split('\n').map(|line| pem(line, &mut in_pem).unwrap_or_else(|| words(line)));
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether a text may contain a credential at all.
fn is_suspicious(text: &str) -> bool {
    let lower = text.to_lowercase();
    ["eyj", "-----begin", "bearer", "ls0tls1crudjti"].iter().any(|mark| lower.contains(mark))
        || SENSITIVE.iter().any(|part| lower.contains(part))
}

/// Replaces the lines of a PEM block; None for other lines.
fn pem(line: &str, in_pem: &mut bool) -> Option<String> {
    let begins = line.contains("-----BEGIN");
    let was_in = *in_pem;
    *in_pem = (begins || was_in) && !line.contains("-----END");
    (begins || was_in).then(|| REMOVED.to_owned())
}

fn words(line: &str) -> String {
    let mut is_next = false;
    let words = line.split(' ').map(|word| {
        let was_next = std::mem::replace(&mut is_next, word.eq_ignore_ascii_case("bearer"));
        if was_next { REMOVED.to_owned() } else { one_word(word) }
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Redacts `flag=value` and encoded credentials (JSON Web Tokens, base64 of PEM).
fn one_word(word: &str) -> String {
    if word.contains("eyJ") && word.matches('.').count() >= 2 || word.contains("LS0tLS1CRUdJTi") {
        return REMOVED.to_owned();
    }
    if let Some((name, value)) = word.split_once('=') {
        // A path is not a credential, and support needs it.
        let is_path = value.trim_start_matches(['"', '\'']).starts_with('/');
        if is_sensitive(name) && !is_path && !value.is_empty() {
            return format!("{name}={REMOVED}");
        }
    }
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_and_copies_are_removed_from_objects() {
        let shown = items(vec![json!({
            "metadata": {"name": "a", "managedFields": [], "annotations": {
                "kubectl.kubernetes.io/last-applied-configuration": "{\"x\":\"hidden-1\"}", "kept": "yes"}},
            "status": {"formatToken": "hidden-2", "diskUUID": "d"},
            "data": {"kubeconfig": "hidden-3"},
            "spec": {"env": [{"name": "API_TOKEN", "value": "hidden-4"}], "secretName": "kept-name",
                "args": ["--infra-password=hidden-5", "--management-kubeconfig=/etc/kept"]},
        })]);
        let text = serde_json::to_string(&shown).unwrap();
        assert!(!text.contains("hidden") && !text.contains("managedFields"), "{text}");
        assert!(
            ["\"kept\"", "kept-name", "/etc/kept", "\"d\""].iter().all(|part| text.contains(part)),
            "{text}"
        );
    }

    #[test]
    fn tokens_and_keys_are_removed_from_logs() {
        let text = "a\nAuthorization: Bearer abc.def\n-----BEGIN PRIVATE KEY-----\nMIIhidden\n-----END \
         PRIVATE KEY-----\nx eyJhbGciOi.eyJzdWIi.sig y";
        assert_eq!(
            log(text),
            "a\nAuthorization: Bearer (removed)\n(removed)\n(removed)\n(removed)\nx (removed) y"
        );
        assert_eq!(log("plain text"), "plain text");
    }
}
