//! Fuzz targets: see CONTRIBUTING.md, "Fuzzing".

use prost::Message;
use tonic::Code;

use crate::capability::{self, Access};
use crate::objects::NamedObjects;
use crate::page::page;
use crate::proto;
use crate::request::{MAX_NAME, Size, required};

/// Names for pages of a list.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// What the requests of both drivers have in common: names, capabilities, sizes and pages. The first byte selects the message.
pub fn csi_messages(data: &[u8]) {
    let Some((kind, message)) = data.split_first() else { return };
    match kind % 3 {
        0 => of_message(message, |request: &proto::CreateVolumeRequest| {
            name(&request.name);
            capabilities(&request.volume_capabilities);
            size(request.capacity_range.as_ref());
        }),
        1 => of_message(message, |request: &proto::ControllerPublishVolumeRequest| {
            name(&request.volume_id);
            let outcome = capability::required(request.volume_capability.as_ref());
            refused_with(outcome.err(), &[Code::InvalidArgument]);
        }),
        _ => of_message(message, pages),
    }
}

/// Checks a message, and that its names are found, if it can be decoded.
fn of_message<M: Message + Default + 'static>(bytes: &[u8], check: impl FnOnce(&M)) {
    let Ok(message) = M::decode(bytes) else { return };
    NamedObjects::of(&message).record(&tracing::Span::none());
    check(&message);
}

fn refused_with(refusal: Option<tonic::Status>, codes: &[Code]) {
    if let Some(refusal) = refusal {
        assert!(codes.contains(&refusal.code()) && !refusal.message().is_empty(), "{refusal}");
    }
}

fn name(value: &str) {
    match required("name", value) {
        Ok(name) => assert!((1..=MAX_NAME).contains(&name.len())),
        refusal => refused_with(refusal.err(), &[Code::InvalidArgument]),
    }
}

fn capabilities(requested: &[proto::VolumeCapability]) {
    match capability::required_all(requested) {
        Ok(all) => {
            let blocks = all.iter().filter(|one| one.access == Access::Block).count();
            assert!(!all.is_empty() && (blocks == 0 || blocks == all.len()));
        }
        refusal => refused_with(refusal.err(), &[Code::InvalidArgument]),
    }
}

fn size(range: Option<&proto::CapacityRange>) {
    match Size::from_range(range, 1 << 30) {
        Ok(size) => assert!(size.admits(size.required) && size.limit.is_none_or(size_is_signed), "{size:?}"),
        refusal => refused_with(refusal.err(), &[Code::InvalidArgument, Code::OutOfRange]),
    }
}

fn size_is_signed(bytes: u64) -> bool {
    i64::try_from(bytes).is_ok()
}

/// From any token, the pages end, and no entry is on two of them.
fn pages(request: &proto::ListVolumesRequest) {
    let (mut token, mut seen) = (request.starting_token.clone(), Vec::new());
    loop {
        let found = page(NAMES.to_vec(), |name| (*name).to_owned(), request.max_entries, &token);
        let Ok(found) = found else {
            return refused_with(found.err(), &[Code::InvalidArgument, Code::Aborted]);
        };
        seen.extend(found.entries);
        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]), "{seen:?}");
        if found.next.is_empty() {
            return;
        }
        token = found.next;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn csi_messages() {
        fuzz_kit::replay("csi_messages", super::csi_messages);
    }
}
