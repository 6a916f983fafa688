//! Status of a lab and its components.

use anyhow::Result;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Node;
use kube::Api;

use crate::kubeconfig;
use crate::process::{Process, boot_id};
use crate::run::Run;
use crate::state::{Component, State, VmRecord};
use crate::ui::{say, table};
use crate::vm;

/// Prints every component, and returns whether all are ready.
pub async fn status(run: &Run) -> Result<bool> {
    let state = run.state()?;
    let components =
        join_all(state.components.iter().map(|(name, component)| component_row(run, name, component))).await;
    let vms = join_all(state.vms.iter().map(|(name, vm_record)| vm_row(run, &state, name, vm_record))).await;
    let rows: Vec<Row> = components.into_iter().chain(vms).collect();
    let cells: Vec<Vec<String>> = rows.iter().map(Row::cells).collect();
    for line in table(&["COMPONENT", "STATE", "PID", "ADDRESS"], &cells) {
        say(line);
    }
    say(format!("\nrun folder  {}", run.dir().display()));
    for (name, cluster) in state
        .management
        .iter()
        .map(|cluster| ("mgmt", cluster))
        .chain(state.guests.iter().map(|(name, guest)| (name.as_str(), &guest.cluster)))
    {
        say(format!("kubeconfig  {name:<5} {}", cluster.kubeconfig.display()));
    }
    let ready = state.complete && rows.iter().all(|row| row.state == "ready");
    if state.boot_id != boot_id() {
        say("\nthe host was restarted since `up`: run `cargo lab down`, then `cargo lab up`");
    } else if !state.complete {
        say("\n`up` did not complete: run `cargo lab down`, then `cargo lab up`");
    }
    Ok(ready)
}

struct Row {
    name: String,
    state: String,
    pid: Option<i32>,
    address: String,
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let pid = self.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        vec![self.name.clone(), self.state.clone(), pid, self.address.clone()]
    }
}

/// The first line of a reason, cut to fit into the table.
fn not_ready(reason: &str) -> String {
    let line: String = reason.lines().next().unwrap_or_default().chars().take(90).collect();
    format!("NOT READY: {line}")
}

async fn component_row(run: &Run, name: &str, component: &Component) -> Row {
    let process = run.process(name).filter(Process::alive);
    let state = match process {
        None => "DEAD".to_owned(),
        Some(_) => match component.ready.check().await {
            Ok(()) => "ready".to_owned(),
            Err(reason) => not_ready(&reason),
        },
    };
    Row {
        name: name.to_owned(),
        state,
        pid: process.map(|process| process.pid),
        address: component.ready.address(),
    }
}

async fn vm_row(run: &Run, state: &State, name: &str, vm_record: &VmRecord) -> Row {
    let process = vm::process(run, name, vm_record);
    let health = match process {
        None => "DEAD".to_owned(),
        Some(_) => {
            node_state(state, name, vm_record).await.unwrap_or_else(|error| not_ready(&format!("{error:#}")))
        }
    };
    let place = if state.hosts().len() > 1 { vm_record.host.name() } else { vm_record.zone.clone() };
    let address = format!(
        "{} of {}, {place}, {}, kubelet on {}",
        vm_record.uuid, vm_record.guest, vm_record.accelerator, vm_record.kubelet_port
    );
    Row { name: name.to_owned(), state: health, pid: process.map(|process| process.pid), address }
}

async fn node_state(state: &State, name: &str, vm_record: &VmRecord) -> Result<String> {
    let Some(guest) = state.guests.get(&vm_record.guest) else {
        return Ok("NOT READY: no guest cluster".to_owned());
    };
    let nodes: Api<Node> = Api::all(kubeconfig::client(&guest.cluster.kubeconfig).await?);
    let Some(node) = nodes.get_opt(name).await? else { return Ok("NOT READY: no Node object".to_owned()) };
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    let ready = conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    Ok(if ready { "ready" } else { "NOT READY: the Node is not ready" }.to_owned())
}
