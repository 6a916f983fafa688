//! The condition of a volume in two texts, as [`Message`] has them: the storage infra's text names pools, paths and VMs.

use infra_api::{Condition, ConditionCause};

use super::Message;

/// Why a volume is unhealthy; None if it is healthy.
pub fn condition_message(condition: &Condition) -> Option<Message> {
    let no_reason = || "the storage infra gives no reason".to_owned();
    (!condition.healthy).then(|| {
        Message::new(condition.message.clone().unwrap_or_else(no_reason), for_guest(condition.cause))
    })
}

fn for_guest(cause: Option<ConditionCause>) -> &'static str {
    match cause {
        Some(ConditionCause::Pool) => "the storage of the volume is not healthy",
        Some(ConditionCause::File) => "the data of the volume is missing or damaged",
        Some(ConditionCause::Paused) => {
            "a VM with the volume is paused, because the volume got no space; it resumes once there is space"
        }
        Some(ConditionCause::DiskLost) => "the disk disappeared from a running VM",
        Some(ConditionCause::UnexpectedDisk) => "a VM has the disk without an attachment",
        Some(ConditionCause::Altered) => {
            "the disk in a VM was changed from outside, so that its data may be elsewhere; until the platform team has repaired \
             that, the volume is not attached elsewhere, copied, expanded or deleted"
        }
        Some(ConditionCause::Suspended) => "the platform team suspended the volume",
        Some(ConditionCause::Other) | None => "the volume is not healthy",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_reads_the_cause_and_not_the_text() {
        let condition = Condition {
            healthy: false,
            cause: Some(ConditionCause::Pool),
            message: Some("the pool pool-7 is not healthy".to_owned()),
        };
        let message = condition_message(&condition).unwrap();
        assert_eq!(message.guest(), "the storage of the volume is not healthy");
        assert_eq!(message.to_string(), "the pool pool-7 is not healthy");
        assert_eq!(condition_message(&Condition::default()), None);
    }
}
