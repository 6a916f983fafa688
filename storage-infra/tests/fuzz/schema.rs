//! Values of JSON schemas: valid ones, values at their bounds, broken ones; and whether a value matches a schema.

use std::collections::BTreeMap;

use fastrand::Rng;
use serde_json::{Map, Value, json};
use uuid::Uuid;

/// Numbers at which something changes.
const NUMBERS: [u64; 8] = [0, 1, 4096, 1 << 20, (1 << 20) + 1, 1 << 50, i64::MAX as u64, u64::MAX];
/// Texts that parsers treat in a special way.
const TEXTS: [&str; 8] = ["", "a", "A", "x y", "../../etc", "\u{0}\n", "\u{202e}ü", "true"];
/// Maximum number of elements of generated lists and maps.
const MOST: usize = 3;

/// The schemas of the document, and texts that mean something, by name.
pub struct Schemas<'a> {
    pub api: &'a Value,
    pub known: &'a BTreeMap<&'static str, Vec<String>>,
}

/// Resolves a reference to a schema.
pub fn resolved<'a>(api: &'a Value, schema: &'a Value) -> &'a Value {
    let target = schema["$ref"].as_str().and_then(|target| api.pointer(target.trim_start_matches('#')));
    target.unwrap_or(schema)
}

/// Alternatives of a schema, if it has any.
fn alternatives(schema: &Value) -> Option<&Vec<Value>> {
    ["oneOf", "anyOf", "allOf"].into_iter().find_map(|many| schema[many].as_array())
}

/// The types of a schema.
fn types(schema: &Value) -> Vec<&str> {
    match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

impl Schemas<'_> {
    /// A value of a schema for a parameter or field of this name.
    pub fn value(&self, rng: &mut Rng, schema: &Value, name: &str) -> Value {
        let schema = resolved(self.api, schema);
        if let Some(all) = alternatives(schema) {
            let one = pick(rng, all);
            return self.value(rng, one, name);
        }
        if let Some(words) = schema["enum"].as_array() {
            return pick(rng, words).clone();
        }
        match types(schema).first().copied() {
            Some("string") => json!(self.text(rng, schema, name)),
            Some("integer" | "number") => json!(pick(rng, &NUMBERS)),
            Some("boolean") => json!(rng.bool()),
            Some("array") => {
                let count = rng.usize(..=MOST);
                (0..count).map(|_| self.value(rng, &schema["items"], name)).collect()
            }
            Some("object") => Value::Object(self.object(rng, schema)),
            _ => Value::Null,
        }
    }

    fn text(&self, rng: &mut Rng, schema: &Value, name: &str) -> String {
        match self.known.get(name) {
            Some(known) => pick(rng, known).clone(),
            None if schema["format"] == "uuid" => Uuid::from_u128(rng.u128(..)).to_string(),
            None if rng.u8(..) == 0 => "x".repeat(rng.usize(..4096)),
            None => (*pick(rng, &TEXTS)).to_owned(),
        }
    }

    /// All required fields, and a third of the others: with many of them, hardly a request would be valid.
    fn object(&self, rng: &mut Rng, schema: &Value) -> Map<String, Value> {
        let mut object = Map::new();
        for (field, schema_of_field) in schema["properties"].as_object().into_iter().flatten() {
            if is_required(schema, field) || rng.u8(..3) == 0 {
                object.insert(field.clone(), self.value(rng, schema_of_field, field));
            }
        }
        if schema["additionalProperties"].is_object() {
            for _ in 0..rng.usize(..MOST) {
                object.insert(self.text(rng, &Value::Null, ""), json!(self.text(rng, &Value::Null, "")));
            }
        }
        object
    }
}

/// A value with one field removed, added, or replaced by something of another type.
pub fn broken(rng: &mut Rng, mut value: Value) -> Value {
    let odd = [json!(null), json!(-1), json!(1.5), json!("x".repeat(5000)), json!([[]]), json!({"a": {}})];
    let odd = pick(rng, &odd).clone();
    match &mut value {
        Value::Object(fields) => {
            let names: Vec<String> = fields.keys().cloned().chain(["unknown".to_owned()]).collect();
            let name = pick(rng, &names);
            match rng.bool() {
                true => drop(fields.remove(name)),
                false => drop(fields.insert(name.clone(), odd)),
            }
            value
        }
        _ => odd,
    }
}

fn pick<'a, T>(rng: &mut Rng, all: &'a [T]) -> &'a T {
    &all[rng.usize(..all.len())]
}

fn is_required(schema: &Value, field: &str) -> bool {
    schema["required"].as_array().is_some_and(|required| required.iter().any(|one| one == field))
}

/// Checks that a value matches a schema.
pub fn check(api: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let schema = resolved(api, schema);
    let mismatch = || Err(format!("{value} is not {schema}"));
    if let Some(all) = alternatives(schema) {
        return if all.iter().any(|one| check(api, one, value).is_ok()) { Ok(()) } else { mismatch() };
    }
    if let Some(words) = schema["enum"].as_array() {
        return if words.contains(value) { Ok(()) } else { mismatch() };
    }
    let is_of = |name: &&str| match *name {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => value.is_null(),
    };
    let types = types(schema);
    if !types.is_empty() && !types.iter().any(is_of) {
        return mismatch();
    }
    let items = value.as_array().into_iter().flatten();
    items.into_iter().try_for_each(|item| check(api, &schema["items"], item))?;
    fields(api, schema, value)
}

fn fields(api: &Value, schema: &Value, value: &Value) -> Result<(), String> {
    let Some(object) = value.as_object() else { return Ok(()) };
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    if let Some(missing) = required.into_iter().find(|field| !object.contains_key(*field)) {
        return Err(format!("{value} has no {missing}"));
    }
    let Some(properties) = schema["properties"].as_object() else { return Ok(()) };
    for (field, value) in object {
        let schema = properties.get(field).ok_or_else(|| format!("field {field} is not documented"))?;
        check(api, schema, value)?;
    }
    Ok(())
}
