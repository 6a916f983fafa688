use std::sync::Arc;

use jiff::SignedDuration;
use serde_json::json;

use super::super::query::Parameters;
use super::*;
use crate::decide::pool::testing::pool;
use crate::feed::testing::warning;
use crate::overview::{Inputs, Warnings};
use crate::pools::Read;

const HOSTILE: &str = "\"><script>alert(1)</script><img src=x onerror='alert(1)'>\u{202e}";

fn clock() -> Clock {
    Clock { now: "2026-01-01T01:00:00Z".parse().unwrap(), late_after: SignedDuration::from_mins(2) }
}

fn model(inputs: &Inputs, events: Vec<EventRow>) -> Model {
    Model {
        overview: Overview::of(inputs, clock()),
        pools: None,
        events,
        last: 7,
        stale: Vec::new(),
        clock: clock(),
        view: Parameters::default().into(),
    }
}

/// Claims, a VM and events whose texts are all hostile.
fn hostile() -> Model {
    let claim = json!({
        "metadata": {
            "name": HOSTILE, "namespace": HOSTILE, "labels": {"nestor.dev/cluster-id": HOSTILE},
            "annotations": {"nestor.dev/guest-pvc": HOSTILE, "nestor.dev/guest-namespace": HOSTILE},
        },
        "spec": {"storageClassName": HOSTILE},
        "status": {"phase": "Bound", "conditions": [
            {"type": "nestor.dev/Healthy", "status": "False", "message": HOSTILE},
        ]},
    });
    let vm = json!({
        "apiVersion": "vmoperator.vmware.com/v1alpha6", "kind": "VirtualMachine",
        "metadata": {"name": HOSTILE, "namespace": HOSTILE},
        "spec": {"volumes": [{"name": HOSTILE, "persistentVolumeClaim": {"claimName": HOSTILE}}]},
        "status": {"powerState": HOSTILE, "volumes": [{"name": HOSTILE, "error": HOSTILE.repeat(5)}]},
    });
    let event = warning(HOSTILE, HOSTILE, clock().now);
    let inputs = Inputs {
        claims: vec![Arc::new(serde_json::from_value(claim).unwrap())],
        vms: vec![Arc::new(serde_json::from_value(vm).unwrap())],
        warnings: Warnings::of([event.clone()]),
        ..Inputs::default()
    };
    let mut model = model(&inputs, vec![EventRow { uid: HOSTILE.to_owned(), ..event }]);
    model.stale = vec![(HOSTILE.to_owned(), HOSTILE.to_owned())];
    let mut pool = pool("a", 1);
    (pool.healthy, pool.message) = (false, Some(HOSTILE.to_owned()));
    let health = json!({
        "healthy": false, "version": HOSTILE, "catalogWritable": true, "poolsHealthy": 0, "poolsTotal": 1,
        "unknownFiles": 0,
        "hypervisors": [{"name": HOSTILE, "kind": "loop", "reachable": false, "message": HOSTILE}],
    });
    let health = serde_json::from_value(health).unwrap();
    let read = Read { time: clock().now, pools: vec![pool], health };
    model.pools = Some(Pools { read: Some(Arc::new(read)), error: None });
    model
}

#[test]
fn hostile_text_never_becomes_markup() {
    let mut model = hostile();
    for search in ["", HOSTILE] {
        model.view = serde_json::from_value::<Parameters>(json!({"q": search})).unwrap().into();
        let page = render(&model).into_string();
        assert_eq!(page.matches("<script").count(), 1, "only the page's own");
        assert!(!page.contains("<img") && !page.contains("\u{202e}"), "{page}");
        assert!(page.contains("&lt;img src=x"), "{page}");
    }
}

#[test]
fn the_page_has_nothing_inline_and_every_table_has_headers() {
    let page = render(&hostile()).into_string();
    for inline in [" style=", "<style", " onclick", "javascript:"] {
        assert!(!page.contains(inline), "{inline}");
    }
    assert_eq!(page.matches("<table>").count(), page.matches("<thead>").count());
    for (id, _) in SECTIONS {
        assert!(page.contains(&format!("<section id=\"{id}\"")), "{id}");
        assert!(page.contains(&format!("id=\"{id}-title\"")), "{id}");
    }
}

#[test]
fn without_a_connection_the_page_says_why_there_are_no_pools() {
    let page = render(&model(&Inputs::default(), Vec::new())).into_string();
    assert!(page.contains("no connection to the storage infra (--infra-url)"), "{page}");
    assert!(page.contains("No disks.") && page.contains("No volumes.") && page.contains("No events."));
}

#[test]
fn a_page_of_many_volumes_is_bounded() {
    let claim = |number: usize| {
        let claim = json!({
            "metadata": {"name": format!("pvc-{number:05}"), "namespace": "n", "labels": {"nestor.dev/cluster-id": "g"}},
            "status": {"phase": "Bound"},
        });
        Arc::new(serde_json::from_value(claim).unwrap())
    };
    let inputs = Inputs { claims: (0..10_000).map(claim).collect(), ..Inputs::default() };
    let mut model = model(&inputs, Vec::new());
    model.view = serde_json::from_value::<Parameters>(json!({"volumes": "3"})).unwrap().into();
    let page = render(&model).into_string();
    assert_eq!(page.matches("<code>pvc-").count(), 50);
    assert!(page.contains("pvc-00100") && page.contains("Page 3 of 200"), "{page}");
    assert!(
        page.contains("href=\"?volumes=4#volumes\"") && page.contains("href=\"?volumes=2#volumes\""),
        "{page}"
    );
}
