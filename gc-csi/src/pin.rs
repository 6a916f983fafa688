//! Pin of a guest PersistentVolume to a management PersistentVolume. The volume handle is the name of a management
//! claim, and that name can be reused by a recreated claim with other data. The name of the claim's PersistentVolume is
//! unique, because it contains the claim's UID. It is therefore stored in the immutable volume attributes of the guest
//! PersistentVolume; an annotation can override it.

use crds::names::MANAGEMENT_VOLUME;
use kube_kit::partial::PersistentVolume;

/// The management PersistentVolume that a guest PersistentVolume is pinned to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pin {
    /// From the immutable volume attributes.
    pub(crate) attribute: Option<String>,
    /// From the annotation, which overrides the attribute.
    pub(crate) annotation: Option<String>,
}

/// The pin of a call is ambiguous.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "guest PersistentVolumes {0} and {1} have the same volumeHandle, but are pinned to different management \
     PersistentVolumes, {2} and {3}: correct annotation {MANAGEMENT_VOLUME} of the wrong one, or delete it"
)]
pub(crate) struct Ambiguous(String, String, String, String);

impl Pin {
    /// The pin of a guest PersistentVolume. An empty value is no pin.
    pub(crate) fn of(volume: &PersistentVolume) -> Self {
        let attribute = volume.spec.csi.as_ref().and_then(|csi| csi.attribute(MANAGEMENT_VOLUME));
        let annotations = volume.metadata.annotations.as_ref();
        let annotation = annotations.and_then(|all| all.get(MANAGEMENT_VOLUME)).map(String::as_str);
        let [attribute, annotation] = [attribute, annotation].map(non_empty);
        Self { attribute, annotation }
    }

    /// The pin of a call, which has the volume attributes but not the name of its PersistentVolume: that of the
    /// PersistentVolumes with the same attribute. `volumes` has the names and pins of the candidates.
    pub(crate) fn of_call<'a>(
        attribute: Option<&str>,
        volumes: impl Iterator<Item = (&'a str, &'a Self)>,
    ) -> Result<Self, Ambiguous> {
        let attribute = non_empty(attribute);
        let mut same = volumes.filter(|(_, pin)| pin.attribute == attribute);
        let Some((name, first)) = same.next() else { return Ok(Self { attribute, annotation: None }) };
        match same.find(|(_, pin)| pin.to() != first.to()) {
            None => Ok(first.clone()),
            Some((other_name, other)) => {
                let to = |pin: &Self| pin.to().unwrap_or("none").to_owned();
                Err(Ambiguous(name.to_owned(), other_name.to_owned(), to(first), to(other)))
            }
        }
    }

    /// The management PersistentVolume; None without a pin.
    pub(crate) fn to(&self) -> Option<&str> {
        self.annotation.as_deref().or(self.attribute.as_deref())
    }

    /// The pinned PersistentVolume that the annotation overrides.
    pub(crate) fn overridden(&self) -> Option<&str> {
        self.attribute.as_deref().filter(|attribute| Some(*attribute) != self.to())
    }
}

fn non_empty(value: Option<&str>) -> Option<String> {
    value.filter(|value| !value.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pin(attribute: &str, annotation: &str) -> Pin {
        let csi = json!({
            "driver": "d", "volumeHandle": "h", "volumeAttributes": {MANAGEMENT_VOLUME: attribute, "other": "b"},
        });
        let metadata = json!({"name": "pv", "annotations": {MANAGEMENT_VOLUME: annotation}});
        Pin::of(&serde_json::from_value(json!({"metadata": metadata, "spec": {"csi": csi}})).unwrap())
    }

    #[test]
    fn the_annotation_overrides_the_attribute() {
        for (attribute, annotation, to, overridden) in [
            ("", "", None, None),
            ("a", "", Some("a"), None),
            ("a", "a", Some("a"), None),
            ("a", "b", Some("b"), Some("a")),
            ("", "b", Some("b"), None),
        ] {
            let pin = pin(attribute, annotation);
            assert_eq!((pin.to(), pin.overridden()), (to, overridden), "{attribute:?} {annotation:?}");
        }
        assert_eq!(Pin::of(&PersistentVolume::default()), Pin::default());
    }

    #[test]
    fn the_pin_of_a_call_is_that_of_the_volumes_with_the_same_attribute() {
        let of_call = |attribute, volumes: &[(&'static str, Pin)]| {
            Pin::of_call(attribute, volumes.iter().map(|(name, pin)| (*name, pin)))
        };
        let volumes = [("one", pin("a", "")), ("other", pin("b", "c")), ("third", pin("", ""))];
        let to = |attribute| of_call(attribute, &volumes).map(|pin| pin.to().map(str::to_owned));
        assert_eq!(to(Some("a")), Ok(Some("a".to_owned())));
        assert_eq!(to(Some("b")), Ok(Some("c".to_owned())));
        assert_eq!((to(None), to(Some(""))), (Ok(None), Ok(None)));
        // Its PersistentVolume is missing or not cached yet.
        assert_eq!(to(Some("z")), Ok(Some("z".to_owned())));

        let twins = [("one", pin("a", "")), ("two", pin("a", "b"))];
        let refused = of_call(Some("a"), &twins).unwrap_err().to_string();
        assert!(["one", "two", " a ", " b:"].iter().all(|text| refused.contains(text)), "{refused}");
    }
}
