//! Errors of the management room as CSI status codes.
//!
//! The sidecars take UNAVAILABLE, ABORTED, CANCELLED and DEADLINE_EXCEEDED as "may still be under way":
//! those are used only where something was left to be finished; every other code is final and says that
//! nothing was left behind.

use csi::Status;

use crate::management::ApiError;
use crate::management::claims::{CreateError, DeleteError};
use crate::management::commit::CommitError;
use crate::management::disks::{AttachError, DetachError};

pub(super) fn create(error: &CreateError) -> Status {
    let text = error.to_string();
    match error {
        // The class names something that isn't there: the request can't succeed as it is.
        CreateError::NoClass { .. } => Status::invalid_argument(text),
        CreateError::NoSuchSize { .. } | CreateError::TooLarge { .. } => Status::out_of_range(text),
        CreateError::Differs { .. } => Status::already_exists(text),
        // The claim is there and the management tier goes on trying.
        CreateError::Failing { .. } => Status::unavailable(text),
        CreateError::Lost { .. } => Status::aborted(text),
        CreateError::Deleting { .. } => Status::aborted(text),
        CreateError::Deadline { .. } => Status::deadline_exceeded(text),
        CreateError::Api { source, .. } => api(source, text),
    }
}

pub(super) fn delete(error: &DeleteError) -> Status {
    let text = error.to_string();
    match error {
        DeleteError::Attached { .. } => Status::failed_precondition(text),
        DeleteError::Deadline { .. } => Status::deadline_exceeded(text),
        DeleteError::Api { source, .. } => api(source, text),
    }
}

pub(super) fn attach(error: &AttachError) -> Status {
    let text = error.to_string();
    match error {
        AttachError::NoMachine(_) | AttachError::NoClaim(_) => Status::not_found(text),
        AttachError::NotBound(_) => Status::unavailable(text),
        AttachError::InUse { .. } => Status::failed_precondition(text),
        AttachError::Differs { .. } => Status::already_exists(text),
        // The entry is in the machine's spec and the management tier goes on trying.
        AttachError::Failed { .. } => Status::unavailable(text),
        AttachError::Leaving { .. } => Status::aborted(text),
        AttachError::Deadline { .. } => Status::deadline_exceeded(text),
        AttachError::Commit(error) => commit(error, text),
    }
}

pub(super) fn detach(error: &DetachError) -> Status {
    let text = error.to_string();
    match error {
        DetachError::Failed { .. } => Status::unavailable(text),
        DetachError::Deadline { .. } => Status::deadline_exceeded(text),
        DetachError::Commit(error) => commit(error, text),
    }
}

fn commit(error: &CommitError, text: String) -> Status {
    match error {
        CommitError::NoMachine(_) => Status::not_found(text),
        CommitError::Taken { .. } => Status::failed_precondition(text),
        CommitError::Api { source, .. } => api(source, text),
    }
}

fn api(error: &ApiError, text: String) -> Status {
    match error {
        ApiError::Quota(_) => Status::resource_exhausted(text),
        ApiError::Forbidden(_) => Status::permission_denied(text),
        ApiError::Invalid(_) => Status::invalid_argument(text),
        ApiError::NotFound(_) => Status::not_found(text),
        // Somebody else is at the same object: the next try sees what came of it.
        ApiError::Conflict(_) | ApiError::Exists(_) => Status::aborted(text),
        // The request may have been carried out.
        ApiError::Unavailable(_) => Status::unavailable(text),
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn a_quota_is_final_and_a_silent_api_is_not() {
        let error = |source| CreateError::Api { claim: "c".to_owned(), source };
        assert_eq!(create(&error(ApiError::Quota("q".to_owned()))).code(), Code::ResourceExhausted);
        assert_eq!(create(&error(ApiError::Unavailable("u".to_owned()))).code(), Code::Unavailable);
    }
}
