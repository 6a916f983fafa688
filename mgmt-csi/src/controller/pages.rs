//! Lists in pages, as the specification asks for them.

use std::future::Future;

use infra_api::List;
use tonic::Status;

use crate::infra::ReadError;

/// Collects the infra's pages into one page of at most `most` items, all where it is 0. `kind` begins every token, so
/// that a text from elsewhere is not taken for one.
pub(super) async fn collect<T, Answer>(
    kind: &str,
    most: i32,
    token: &str,
    page: impl Fn(Option<u32>, Option<String>) -> Answer,
) -> Result<(Vec<T>, String), Status>
where
    Answer: Future<Output = Result<List<T>, ReadError>>,
{
    let most = u32::try_from(most)
        .map_err(|_| Status::invalid_argument(format!("max_entries is {most}, and can't be negative")))?;
    let invalid_token = || {
        Status::aborted(format!(
            "starting_token {token:?} is not one of this driver's: start again without one"
        ))
    };
    let prefix = format!("{kind}-after:");
    let mut next = match token {
        "" => None,
        token => Some(token.strip_prefix(&prefix).ok_or_else(invalid_token)?.to_owned()),
    };
    let mut items = Vec::new();
    // Without a limit the caller wants everything; the infra gives pages all the same.
    loop {
        let left = (most > 0).then(|| most.saturating_sub(u32::try_from(items.len()).unwrap_or(u32::MAX)));
        let page = match page(left, next).await {
            Err(ReadError::Invalid(_)) if !token.is_empty() => return Err(invalid_token()),
            answer => answer?,
        };
        items.extend(page.items);
        next = page.next;
        if next.is_none() || (most > 0 && items.len() >= most as usize) {
            let token = next.map(|next| format!("{prefix}{next}")).unwrap_or_default();
            return Ok((items, token));
        }
    }
}
