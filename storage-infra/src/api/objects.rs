//! Bodies in which lists stand for objects are refused. Serde also reads a struct from a list of its fields in order, so
//! that `[]` would be limits without a limit.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde_json::{Error, Value};

/// Fails if a list stands for an object in a body that is read as this type.
pub(super) fn check<T: DeserializeOwned>(body: &[u8]) -> Result<(), Error> {
    let value = Strict(serde_json::from_slice(body)?);
    let read: Result<T, _> = serde_path_to_error::deserialize(value);
    read.map(drop).map_err(Error::custom)
}

/// A value that is a struct only if it is an object.
struct Strict(Value);

impl<'de> IntoDeserializer<'de, Error> for Strict {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Strict {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Array(items) => SeqDeserializer::new(items.into_iter().map(Self)).deserialize_any(visitor),
            Value::Object(fields) => {
                let fields = fields.into_iter().map(|(name, value)| (name, Self(value)));
                MapDeserializer::new(fields).deserialize_any(visitor)
            }
            scalar => scalar.deserialize_any(visitor),
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match &self.0 {
            Value::Array(_) => Err(Error::custom("must be an object, not a list")),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.0.deserialize_enum(name, variants, visitor)
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use infra_api::{AttachmentSpec, BudgetSpec, NodeSpec, PoolSpec, Qos, SnapshotSpec, VolumeSpec};

    use super::*;

    fn refused<T: DeserializeOwned>(body: &str) -> String {
        assert!(serde_json::from_str::<T>(body).is_ok(), "serde reads {body}");
        check::<T>(body.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_list_is_no_object_wherever_it_stands() {
        assert!(refused::<Qos>("[]").contains("must be an object, not a list"));
        assert!(refused::<BudgetSpec>("[1, 2, 3, 4, {}]").contains("must be an object"));
        let nested = refused::<BudgetSpec>(r#"{"classes": {"gold": [1]}}"#);
        assert_eq!(nested, "classes.gold: must be an object, not a list");
        assert!(refused::<VolumeSpec>(r#"{"capacityBytes": 1, "qos": [5]}"#).starts_with("qos: "));
        assert!(refused::<VolumeSpec>(r#"{"capacityBytes": 1, "owner": []}"#).starts_with("owner: "));
    }

    #[test]
    fn objects_pass_with_all_their_fields() {
        check::<VolumeSpec>(
            br#"{"capacityBytes": 1, "limitBytes": null, "placement": {"pool": "p", "poolLabels": {"a": "b"}, "zones": ["z"]},
            "source": {"snapshot": "s"}, "qos": {"iops": 5}, "shareable": true, "owner": {"account": "g"}, "labels": {}}"#,
        )
        .unwrap();
        check::<AttachmentSpec>(
            br#"{"volume": "v", "node": "00000000-0000-0000-0000-000000000001", "access": "single-node"}"#,
        )
        .unwrap();
        check::<NodeSpec>(br#"{"name": "n", "hypervisor": "h", "zone": "z"}"#).unwrap();
        check::<PoolSpec>(br#"{"engine": "file", "path": "/p", "onFull": "fail"}"#).unwrap();
        check::<SnapshotSpec>(br#"{"volume": "v"}"#).unwrap();
        check::<BudgetSpec>(br#"{"classes": {"gold": {"bytes": 18446744073709551615}}}"#).unwrap();
    }
}
