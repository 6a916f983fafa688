//! Pagination of list calls, by the CSI specification.

use std::future::Future;

use infra_api::List;
use tonic::Status;

use crate::infra::ReadError;

/// Collects pages of the storage infra into one page of at most `most` items, or all if it is 0. Tokens start with `kind`, so
/// that foreign tokens are rejected.
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
        .map_err(|_| Status::invalid_argument(format!("max_entries is {most}, but must not be negative")))?;
    let invalid_token = || {
        Status::aborted(format!(
            "starting_token {token:?} was not issued by this driver; list again without a token"
        ))
    };
    let prefix = format!("{kind}-after:");
    let mut next = match token {
        "" => None,
        token => Some(token.strip_prefix(&prefix).ok_or_else(invalid_token)?.to_owned()),
    };
    let mut items = Vec::new();
    // Without a limit, all items are returned; the storage infra returns them in pages.
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
