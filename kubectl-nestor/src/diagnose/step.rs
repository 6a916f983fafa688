//! Steps of a diagnosis: one per object, with its state, cause and remedy.

use jiff::Timestamp;
use kube::api::ObjectMeta;
use process_kit::trace::TraceParent;
use serde::Serialize;

use crate::clusters::Tier;
use crate::gather::snapshot::{About, Lookup, Object};

/// State of an object, as seen by the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Not needed now.
    Idle,
    /// Could not be seen.
    Unknown,
    /// As it should be, but something needs attention.
    Warning,
    /// Work in progress.
    Waiting,
    /// It does not proceed without help, or reports an error.
    Stuck,
}

/// One object on the way of the volume.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    /// Its cluster.
    pub tier: Tier,
    /// Its kind.
    pub kind: &'static str,
    /// Its namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
    /// Its state.
    pub state: State,
    /// The state in a few words.
    pub summary: String,
    /// Since when it has been in this state, as far as the object tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Timestamp>,
    /// Id of the trace of the operation that last wrote the object, if it was traced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_id: Option<String>,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The next thing to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// More fields, for wide output.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub details: Vec<String>,
}

impl Step {
    /// A step without a state yet.
    pub fn new(tier: Tier, kind: &'static str, name: impl Into<String>) -> Self {
        Self {
            tier,
            kind,
            namespace: None,
            name: name.into(),
            state: State::Ok,
            summary: String::new(),
            since: None,
            trace_id: None,
            cause: None,
            action: None,
            details: Vec::new(),
        }
    }

    /// A step about an object. The second value is the object, if it is there to be judged.
    pub fn of<'a, T>(tier: Tier, kind: &'static str, object: &'a Object<T>) -> (Self, Option<&'a T>) {
        let mut step = Self::new(tier, kind, &object.name);
        step.namespace.clone_from(&object.namespace);
        let step = match &object.lookup {
            Lookup::Found(found) => return (step, Some(found)),
            Lookup::Missing => step.is(State::Stuck, "does not exist"),
            Lookup::Refused(reason) => step.is(State::Unknown, "not readable").because(reason),
            Lookup::Unseen => {
                step.is(State::Unknown, format!("not visible without the {} cluster", tier.name()))
            }
        };
        (step, None)
    }

    /// Sets state and summary.
    pub fn is(mut self, state: State, summary: impl Into<String>) -> Self {
        self.state = state;
        self.summary = summary.into();
        self
    }

    /// Sets the time since which the state holds.
    pub fn since(mut self, time: Option<Timestamp>) -> Self {
        self.since = time;
        self
    }

    /// Sets the trace from its context, unless that is malformed.
    pub fn traced(mut self, context: Option<&String>) -> Self {
        let parent = context.and_then(|context| TraceParent::parse(context));
        self.trace_id = parent.map(|parent| parent.trace_id());
        self
    }

    /// Sets the cause.
    pub fn because(mut self, cause: impl Into<String>) -> Self {
        self.cause = Some(cause.into());
        self
    }

    /// Sets the next thing to do.
    pub fn next(mut self, action: impl Into<String>) -> Self {
        self.action = Some(action.into());
        self
    }

    /// Adds a detail if there is one.
    pub fn detail(mut self, name: &str, value: Option<impl AsRef<str>>) -> Self {
        self.details.extend(value.map(|value| format!("{name}={}", value.as_ref())));
        self
    }

    /// The object, for its events; None if it is part of an object.
    pub fn about(&self) -> Option<About> {
        let has_events =
            ["PersistentVolumeClaim", "PersistentVolume", "Pod", "VirtualMachine", "VolumeAttachment"];
        has_events.contains(&self.kind).then(|| About {
            tier: self.tier,
            kind: self.kind,
            namespace: self.namespace.clone(),
            name: self.name.clone(),
        })
    }

    /// Kind and name, with the cluster.
    pub fn title(&self) -> String {
        let namespace = self.namespace.as_ref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
        format!("{} {} {namespace}{}", self.tier.name(), self.kind, self.name)
    }
}

/// Creation time of an object.
pub fn created(meta: &ObjectMeta) -> Option<Timestamp> {
    meta.creation_timestamp.as_ref().map(|time| time.0)
}

/// When the deletion of an object was requested.
pub fn deleted(meta: &ObjectMeta) -> Option<Timestamp> {
    meta.deletion_timestamp.as_ref().map(|time| time.0)
}
