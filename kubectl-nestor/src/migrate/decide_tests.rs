use super::*;

const SERIAL: &str = "5b3f0f0e-8f0e-4c62-9a1f-6b6f6c2f4d11";

fn guest() -> Guest {
    Guest { cluster_id: "id-1".to_owned(), namespace: "guest-one".to_owned() }
}

fn persistent_volume(claim_uid: &str, source: Value) -> PersistentVolume {
    let mut spec = json!({
        "accessModes": ["ReadWriteOnce"], "persistentVolumeReclaimPolicy": "Delete",
        "claimRef": {"namespace": "shop", "name": "data", "uid": claim_uid},
    });
    json_patch::merge(&mut spec, &source);
    serde_json::from_value(json!({"metadata": {"name": "pvc-1"}, "spec": spec})).unwrap()
}

fn data_volume(uid: &str) -> DynamicObject {
    let object = json!({
        "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume",
        "metadata": {"name": "pvc-1", "uid": uid, "labels": {"csi-driver/cluster": "one"}},
        "spec": {"source": {"blank": {}}}, "status": {"phase": "Succeeded"},
    });
    serde_json::from_value(object).unwrap()
}

/// A volume as kubevirt-csi leaves it, in a VM.
fn left() -> Volume {
    let csi = json!({"csi": {
        "driver": "csi.kubevirt.io", "volumeHandle": "pvc-1",
        "volumeAttributes": {"bus": "scsi", "serial": SERIAL},
    }});
    let claim = json!({
        "metadata": {
            "name": "pvc-1", "uid": "claim-1", "resourceVersion": "7",
            "ownerReferences": [{
                "apiVersion": "cdi.kubevirt.io/v1beta1", "kind": "DataVolume", "name": "pvc-1", "uid": SERIAL,
                "controller": true, "blockOwnerDeletion": true,
            }],
        },
        "spec": {"volumeName": "pv-1"},
    });
    let attachment = json!({
        "metadata": {"name": "csi-1"},
        "spec": {"attacher": "csi.kubevirt.io", "nodeName": "vm-1", "source": {"persistentVolumeName": "pvc-1"}},
        "status": {"attached": true},
    });
    Volume {
        guest_volume: persistent_volume("guest-claim", csi),
        attachments: vec![serde_json::from_value(attachment).unwrap()],
        claim: Some(serde_json::from_value(claim).unwrap()),
        management_volume: Some(persistent_volume("claim-1", json!({"csi": null}))),
        data_volume: Some(data_volume(SERIAL)),
        plugged: vec![Plugged {
            vm: "vm-1".to_owned(),
            uid: "uid-1".to_owned(),
            guest: Some("id-1".to_owned()),
            entry: "pvc-1".to_owned(),
            in_template: true,
            serial: Some(SERIAL.to_owned()),
        }],
    }
}

fn merged<T: serde::Serialize + serde::de::DeserializeOwned>(object: &T, patch: &Value) -> T {
    let mut value = serde_json::to_value(object).unwrap();
    json_patch::merge(&mut value, patch);
    serde_json::from_value(value).unwrap()
}

fn with_policy(volume: &PersistentVolume, policy: &str, own: Option<&str>) -> PersistentVolume {
    let patch = json!({
        "metadata": {"annotations": {OWN_POLICY: own}}, "spec": {"persistentVolumeReclaimPolicy": policy},
    });
    merged(volume, &patch)
}

/// The objects after a step.
fn after(volume: &Volume, step: &Step) -> Volume {
    let mut next = volume.clone();
    let of_tier =
        |next: &mut Volume, tier: Tier, change: &dyn Fn(&PersistentVolume) -> PersistentVolume| match tier {
            Tier::Guest => next.guest_volume = change(&next.guest_volume),
            Tier::Management => next.management_volume = next.management_volume.as_ref().map(change),
        };
    match step {
        Step::Retain(tier) => of_tier(&mut next, *tier, &|one| with_policy(one, "Retain", Some(policy(one)))),
        Step::Restore(tier, own) => of_tier(&mut next, *tier, &|one| with_policy(one, own, None)),
        Step::Claim(_, patch) => next.claim = next.claim.as_ref().map(|claim| merged(claim, patch)),
        Step::ShowDisk(_, patch) => next.attachments = vec![merged(&next.attachments[0], patch)],
        Step::Orphan => {
            let retained = [Some(&next.guest_volume), next.management_volume.as_ref()];
            assert!(retained.into_iter().all(|one| one.is_some_and(|one| policy(one) == "Retain")));
            assert!(next.claim.as_ref().is_some_and(is_taken));
            next.data_volume = None;
            next.claim.as_mut().unwrap().metadata.owner_references = None;
        }
        Step::Create(object) => {
            let mut created: DynamicObject = serde_json::from_value(object.clone()).unwrap();
            created.metadata.uid = Some("new".to_owned());
            next.data_volume = Some(created);
        }
    }
    next
}

/// Takes all steps, deciding anew after each, as a repetition after a crash does; returns their names.
fn complete(mut volume: Volume, direction: Direction) -> (Volume, Vec<&'static str>) {
    let mut names = Vec::new();
    loop {
        let steps = steps(&volume, &guest(), direction).unwrap();
        let Some(step) = steps.first() else { return (volume, names) };
        names.push(step.name());
        volume = after(&volume, step);
    }
}

#[test]
fn a_volume_is_taken_over_while_both_volumes_are_retained() {
    let (volume, names) = complete(left(), Direction::Forth);
    assert_eq!(names, ["retain", "retain", "take", "show-disk", "orphan", "restore", "restore"]);
    let claim = volume.claim.unwrap();
    assert_eq!(claim.labels()[LABEL_CLUSTER_ID], "id-1");
    let record: Value = serde_json::from_str(&claim.annotations()[ANNOTATION_ATTACHED_TO]).unwrap();
    assert_eq!((&record["vm"], &record["uid"]), (&json!("vm-1"), &json!("uid-1")));
    assert_eq!(record["take"].as_str().unwrap().len(), 16);
    assert_eq!(claim.annotations()[ANNOTATION_GUEST_PVC], "data");
    let metadata = volume.attachments[0].status.clone().unwrap().attachment_metadata.unwrap();
    assert_eq!(
        (metadata[CONTEXT_DISK_UUID].as_str(), metadata[CONTEXT_MANAGEMENT_VOLUME].as_str()),
        (SERIAL, "pv-1")
    );
    for one in [volume.guest_volume, volume.management_volume.unwrap()] {
        assert_eq!((policy(&one), one.annotations().get(OWN_POLICY)), ("Delete", None));
    }
}

#[test]
fn all_steps_are_planned_as_they_are_taken() {
    for direction in [Direction::Forth, Direction::Back] {
        let volume = match direction {
            Direction::Forth => left(),
            Direction::Back => complete(left(), Direction::Forth).0,
        };
        let planned = steps(&volume, &guest(), direction).unwrap();
        let planned: Vec<&str> = planned.iter().map(Step::name).collect();
        assert_eq!(planned, complete(volume, direction).1);
    }
}

#[test]
fn a_volume_goes_back_to_a_data_volume_that_cdi_does_not_fill() {
    let (volume, names) = complete(complete(left(), Direction::Forth).0, Direction::Back);
    assert_eq!(names, ["retain", "retain", "mark", "create", "give-back", "restore", "restore"]);
    let claim = volume.claim.clone().unwrap();
    assert_eq!(claim.annotations().get(POPULATED_FOR).map(String::as_str), Some("pvc-1"));
    assert_eq!((claim.annotations().len(), claim.labels().len()), (1, 0));
    assert_eq!(owner(&claim), Some("new"));
    let created = volume.data_volume.clone().unwrap();
    assert_eq!(created.annotations()[PRE_POPULATED], "pvc-1");
    assert_eq!(
        (&created.data["spec"], &created.labels()["csi-driver/cluster"]),
        (&json!({"source": {"blank": {}}}), &"one".to_owned())
    );
    assert_eq!(policy(&volume.guest_volume), "Delete");

    // And forth again.
    let mut volume = volume;
    volume.data_volume.as_mut().unwrap().data["status"] = json!({"phase": "Succeeded"});
    assert!(complete(volume, Direction::Forth).0.data_volume.is_none());
}

#[test]
fn a_volume_that_was_retained_stays_retained_and_one_without_a_data_volume_gets_none() {
    let mut volume = left();
    volume.guest_volume = with_policy(&volume.guest_volume, "Retain", None);
    volume.data_volume = None;
    volume.plugged.clear();
    volume.claim.as_mut().unwrap().metadata.owner_references = None;
    let (volume, names) = complete(volume, Direction::Forth);
    assert_eq!(names, ["retain", "take", "restore"]);
    assert_eq!(policy(&volume.guest_volume), "Retain");
    assert!(!volume.claim.as_ref().unwrap().annotations().contains_key(ANNOTATION_ATTACHED_TO));
    let (volume, names) = complete(volume, Direction::Back);
    assert_eq!((names, volume.data_volume.is_none()), (vec!["retain", "give-back", "restore"], true));
}

#[test]
fn a_volume_is_refused_if_somebody_could_lose_data() {
    let why = |change: &dyn Fn(&mut Volume)| {
        let mut volume = left();
        change(&mut volume);
        steps(&volume, &guest(), Direction::Forth).unwrap_err()
    };
    let patched = |patch: Value| {
        move |volume: &mut Volume| volume.claim = volume.claim.as_ref().map(|claim| merged(claim, &patch))
    };
    let second = Plugged { vm: "vm-2".to_owned(), ..left().plugged[0].clone() };
    assert!(why(&|volume| volume.plugged.push(second.clone())).contains("both have claim"));
    assert!(why(&|volume| volume.plugged[0].in_template = false).contains("its template does not"));
    assert!(why(&|volume| volume.plugged[0].guest = None).contains("set the label"));
    assert!(why(&|volume| volume.plugged[0].entry = "disk-pvc-1".to_owned()).contains("disk-pvc-1"));
    assert!(why(&|volume| volume.plugged[0].serial = None).contains("no serial"));
    assert!(why(&|volume| volume.claim = None).contains("there is no PersistentVolumeClaim"));
    assert!(why(&|volume| volume.management_volume = None).contains("not bound"));
    assert!(why(&patched(json!({"metadata": {"uid": "other"}}))).contains("not bound"));
    assert!(
        why(&patched(json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))).contains("deleted")
    );
    assert!(why(&patched(json!({"metadata": {"labels": {LABEL_CLUSTER_ID: "id-2"}}}))).contains("id-2"));
    let owned = json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "X", "name": "x", "uid": "x"}]}});
    assert!(why(&patched(owned)).contains("owned by X x"));
    assert!(
        why(&|volume| volume.data_volume.as_mut().unwrap().data["status"] =
            json!({"phase": "ImportInProgress"}))
        .contains("ImportInProgress")
    );
    let shared = json!({"spec": {"accessModes": ["ReadWriteMany"]}});
    assert!(
        why(&|volume| volume.guest_volume = merged(&volume.guest_volume, &shared)).contains("ReadWriteMany")
    );
    let sata = json!({"spec": {"csi": {"volumeAttributes": {"bus": "sata"}}}});
    assert!(why(&|volume| volume.guest_volume = merged(&volume.guest_volume, &sata)).contains("\"sata\""));
}

#[test]
fn a_disk_that_gc_csi_attached_is_noted_when_it_goes_back() {
    let (mut volume, _) = complete(left(), Direction::Forth);
    assert_eq!(note(&volume, Direction::Back), None);
    volume.plugged[0].serial = Some("other".to_owned());
    assert!(note(&volume, Direction::Back).unwrap().contains("vm-1"));
    assert_eq!(note(&volume, Direction::Forth), None);
}
