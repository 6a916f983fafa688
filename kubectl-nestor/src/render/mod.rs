//! Output: text with colours on a terminal, JSON, YAML.

pub mod table;
pub mod trace;

use std::io::{IsTerminal, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::cli::Format;
use crate::error::Error;

/// Whether standard output takes colours.
pub fn has_colour() -> bool {
    let is_disabled = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !is_disabled && std::io::stdout().is_terminal()
}

/// Writes to standard output. A reader that has gone away is no error.
pub fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Error::Write("to standard output".to_owned(), error))
        }
        _ => Ok(()),
    }
}

/// Formats a result: `text` for people, or the value for programs.
pub fn format<T: Serialize>(
    format: Format,
    value: &T,
    text: impl FnOnce(bool) -> String,
) -> Result<String, Error> {
    match format {
        Format::Text => Ok(text(false)),
        Format::Wide => Ok(text(true)),
        Format::Json => {
            let encoded =
                serde_json::to_string_pretty(value).map_err(|error| Error::Encode(error.to_string()))?;
            Ok(encoded + "\n")
        }
        Format::Yaml => {
            let encoded = serde_saphyr::to_string(value).map_err(|error| Error::Encode(error.to_string()))?;
            Ok(format!("{}\n", encoded.trim_end()))
        }
    }
}

/// Objects as a manifest: YAML, unless JSON is requested.
pub(crate) fn manifest(output: Format, objects: &impl Serialize) -> Result<String, Error> {
    let value = serde_json::to_value(objects).map_err(|error| Error::Encode(error.to_string()))?;
    let value = match value {
        Value::Array(items) => json!({"apiVersion": "v1", "kind": "List", "items": items}),
        one => one,
    };
    let output = if output == Format::Json { Format::Json } else { Format::Yaml };
    format(output, &value, |_| String::new())
}

/// Colours of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// All is well.
    Green,
    /// Attention.
    Yellow,
    /// An error.
    Red,
    /// Less important.
    Dim,
}

/// Puts a text between the escape sequences of a colour, if there are colours.
pub fn paint(text: &str, colour: Colour, has_colour: bool) -> String {
    let code = match colour {
        Colour::Green => 32,
        Colour::Yellow => 33,
        Colour::Red => 31,
        Colour::Dim => 2,
    };
    if has_colour { format!("\u{1b}[{code}m{text}\u{1b}[0m") } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_objects_are_a_list() {
        let objects = (json!({"kind": "A", "apiVersion": "v1"}), json!({"kind": "B"}));
        let list: Value = serde_json::from_str(&manifest(Format::Json, &objects).unwrap()).unwrap();
        assert_eq!(list["kind"], "List");
        assert_eq!(list["items"], json!(objects));
        assert!(manifest(Format::Text, &objects.0).unwrap().contains("apiVersion: v1\n"));
    }
}
