//! Which bytes a guest's PersistentVolume stands for. Its handle is the name of a management claim, and a name comes again
//! when a claim is deleted and made anew, with other bytes. The name of the claim's PersistentVolume does not: dynamic
//! provisioning makes it of the claim's UID. So that name is written into each PersistentVolume of the guest that is
//! made for a claim, where nobody can change it; a person who means another volume says so by an annotation.

use crds::names::MANAGEMENT_VOLUME;
use kube_kit::lean::PersistentVolume;

use crate::compatibility::PvRequirements;

/// The management PersistentVolume that a guest's PersistentVolume is pinned to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Pin {
    /// As its attributes say, which can't be changed.
    pub(crate) attribute: Option<String>,
    /// As its annotation says, which overrides them.
    pub(crate) annotation: Option<String>,
}

/// Why it is not known what a call is pinned to.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "guest PersistentVolumes {0} and {1} are one volume to the driver, but are pinned to different management \
     PersistentVolumes, {2} and {3}: correct annotation {MANAGEMENT_VOLUME} of the one that is wrong, or delete that one"
)]
pub(crate) struct Ambiguous(String, String, String, String);

impl Pin {
    /// The pin of a guest's PersistentVolume. What is empty pins to nothing.
    pub(crate) fn of(volume: &PersistentVolume) -> Self {
        let attribute = volume.spec.csi.as_ref().and_then(|csi| csi.attribute(MANAGEMENT_VOLUME));
        let annotations = volume.metadata.annotations.as_ref();
        let annotation = annotations.and_then(|all| all.get(MANAGEMENT_VOLUME)).map(String::as_str);
        let [attribute, annotation] = [attribute, annotation].map(non_empty);
        Self { attribute, annotation }
    }

    /// The pin of a call that brings this attribute of its PersistentVolume along, and does not name it: of the guest's
    /// `volumes` of the handle, it is for one with the same attribute.
    pub(crate) fn of_call(attribute: Option<&str>, volumes: &[PvRequirements]) -> Result<Self, Ambiguous> {
        let attribute = non_empty(attribute);
        let mut same = volumes.iter().filter(|volume| volume.pin.attribute == attribute);
        let Some(first) = same.next() else { return Ok(Self { attribute, annotation: None }) };
        match same.find(|other| other.pin.to() != first.pin.to()) {
            None => Ok(first.pin.clone()),
            Some(other) => {
                let name = |volume: &PvRequirements| volume.volume.clone().unwrap_or_default();
                let to = |volume: &PvRequirements| volume.pin.to().unwrap_or("none").to_owned();
                Err(Ambiguous(name(first), name(other), to(first), to(other)))
            }
        }
    }

    /// What it is pinned to; None where any volume will do.
    pub(crate) fn to(&self) -> Option<&str> {
        self.annotation.as_deref().or(self.attribute.as_deref())
    }

    /// What it would be pinned to without the annotation, where that says something else.
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
    fn an_annotation_overrides_what_the_volume_was_made_with() {
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
    fn a_call_is_pinned_as_the_volumes_that_it_can_be_for() {
        let volume = |name: &str, pin: Pin| PvRequirements {
            volume: Some(name.to_owned()),
            pin,
            ..PvRequirements::default()
        };
        let volumes =
            [volume("one", pin("a", "")), volume("other", pin("b", "c")), volume("third", pin("", ""))];
        let to = |attribute| Pin::of_call(attribute, &volumes).map(|pin| pin.to().map(str::to_owned));
        assert_eq!(to(Some("a")), Ok(Some("a".to_owned())));
        assert_eq!(to(Some("b")), Ok(Some("c".to_owned())));
        assert_eq!((to(None), to(Some(""))), (Ok(None), Ok(None)));
        // Its volume is not seen yet, or there is none.
        assert_eq!(to(Some("z")), Ok(Some("z".to_owned())));

        let twins = [volume("one", pin("a", "")), volume("two", pin("a", "b"))];
        let refused = Pin::of_call(Some("a"), &twins).unwrap_err().to_string();
        assert!(["one", "two", " a ", " b:"].iter().all(|text| refused.contains(text)), "{refused}");
    }
}
