//! Trace contexts of VolumeAttachments. An attach continues the trace with which the VolumeAttachment was created. The deletion
//! of an object cannot carry a context, so a detach finds it at the VM.

use crds::VolumeAttachment;
use process_kit::operation;
use process_kit::trace::TraceParent;

use super::fence::OutOfService;
use crate::volume_attachment::trace_context;

/// Continues the trace of the change of `spec.volumes` for which a disk is attached or detached.
pub(super) fn continue_trace(attachment: &VolumeAttachment, vms: &OutOfService) {
    let created = trace_context(attachment);
    let changed = vms.trace_context(attachment);
    let is_deleting = attachment.metadata.deletion_timestamp.is_some();
    operation::continue_trace(choose(is_deleting, created, changed.as_deref()));
}

/// The context of the VolumeAttachment or of the VM. After the deletion, a VM with the trace of the attach is outdated.
fn choose<'a>(is_deleting: bool, created: Option<&'a str>, changed: Option<&'a str>) -> Option<&'a str> {
    let trace = |context: &str| TraceParent::parse(context).map(|parent| parent.trace_id());
    match is_deleting {
        false => created.or(changed),
        true => changed.filter(|changed| created.and_then(trace) != trace(changed)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_detach_does_not_continue_the_trace_of_the_attach() {
        let context = |trace: char, span: char| {
            Some(format!("00-{}-{}-01", trace.to_string().repeat(32), span.to_string().repeat(16)))
        };
        let (entry, attach, detach) = (context('a', '1'), context('a', '2'), context('b', '3'));
        let [entry, attach, detach] = [&entry, &attach, &detach].map(|one| one.as_deref());
        assert_eq!(choose(false, attach, entry), attach);
        assert_eq!(choose(false, None, entry), entry);
        assert_eq!(choose(true, attach, detach), detach);
        assert_eq!(choose(true, None, detach), detach);
        assert_eq!(choose(true, attach, entry), None);
        assert_eq!(choose(true, attach, None), None);
    }
}
