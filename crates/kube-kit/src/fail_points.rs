//! Fail points before and after each write to an API server: see the crate `fail_point`. Their names are
//! `kube.<cluster>.<verb>.<resource>[.<subresource>].before` and `.after`.

#[cfg(debug_assertions)]
pub(crate) use debug::layer;

/// No fail points in release builds.
#[cfg(not(debug_assertions))]
pub(crate) fn layer(_cluster: &'static str) -> tower::layer::util::Identity {
    tower::layer::util::Identity::new()
}

#[cfg(debug_assertions)]
mod debug {
    use std::task::{Context, Poll};

    use futures::future::BoxFuture;
    use http::{Method, Request};
    use tower::{Layer, Service};

    /// The fail points of requests to a cluster.
    pub(crate) fn layer(cluster: &'static str) -> FailPointLayer {
        FailPointLayer { cluster }
    }

    #[derive(Debug, Clone)]
    pub(crate) struct FailPointLayer {
        cluster: &'static str,
    }

    impl<S> Layer<S> for FailPointLayer {
        type Service = FailPointService<S>;

        fn layer(&self, inner: S) -> FailPointService<S> {
            FailPointService { cluster: self.cluster, inner }
        }
    }

    #[derive(Debug, Clone)]
    pub(crate) struct FailPointService<S> {
        cluster: &'static str,
        inner: S,
    }

    impl<S, B> Service<Request<B>> for FailPointService<S>
    where
        S: Service<Request<B>>,
        S::Future: Send + 'static,
    {
        type Response = S::Response;
        type Error = S::Error;
        type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

        fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
            self.inner.poll_ready(context)
        }

        fn call(&mut self, request: Request<B>) -> Self::Future {
            let (cluster, method) = (self.cluster, request.method().clone());
            let path = request.uri().path().to_owned();
            let name = move || write(&method, &path).map(|write| format!("kube.{cluster}.{write}"));
            Box::pin(fail_point::around_async(name, self.inner.call(request)))
        }
    }

    /// Name of a write: `<verb>.<resource>[.<subresource>]`; None for reads.
    fn write(method: &Method, path: &str) -> Option<String> {
        let verb = match *method {
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE => "delete",
            _ => return None,
        };
        let words: Vec<&str> = path.split('/').filter(|word| !word.is_empty()).collect();
        // /api/<version>/..., /apis/<group>/<version>/...
        let resource = match *words.first()? {
            "api" => words.get(2..)?,
            "apis" => words.get(3..)?,
            _ => return None,
        };
        let resource = match resource {
            ["namespaces", _, rest @ ..] if !rest.is_empty() => rest,
            other => other,
        };
        let kind = resource.first()?;
        // Reviews are queries that use POST.
        if kind.ends_with("reviews") {
            return None;
        }
        Some(match resource.get(2) {
            Some(subresource) => format!("{verb}.{kind}.{subresource}"),
            None => format!("{verb}.{kind}"),
        })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_write_has_a_name_and_a_read_has_none() {
            let of = |method, path| write(&method, path);
            let named = |method, path, name: &str| assert_eq!(of(method, path).as_deref(), Some(name));
            named(Method::POST, "/api/v1/namespaces/ns/events", "create.events");
            named(
                Method::DELETE,
                "/api/v1/namespaces/ns/persistentvolumeclaims/a",
                "delete.persistentvolumeclaims",
            );
            named(
                Method::PATCH,
                "/apis/nestor.dev/v1alpha1/namespaces/ns/volumeattachments/a/status",
                "patch.volumeattachments.status",
            );
            named(Method::PUT, "/api/v1/persistentvolumes/a", "update.persistentvolumes");
            named(Method::DELETE, "/api/v1/namespaces/ns", "delete.namespaces");
            assert_eq!(of(Method::GET, "/api/v1/namespaces/ns/events"), None);
            assert_eq!(of(Method::POST, "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"), None);
            assert_eq!(of(Method::POST, "/version"), None);
        }
    }
}
