//! The server as a process: client certificates, health, events, shutdown, and the command line.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::support::*;
use futures::StreamExt;
use infra_api::{Change, Client, ClientError, ClientOptions, EventKind, PoolName, ProblemCode, Role};

#[tokio::test]
async fn only_clients_with_a_certificate_of_our_ca_are_accepted() {
    let (site, other) = (Site::new(), Site::new());
    let server = site.ready(&[]).await;
    let url = format!("https://{}", server.api);
    // A certificate of another CA, and a server certificate of another CA.
    let pki = |name: &str| site.path("pki").join(name);
    let strange = |name: &str| other.path("pki").join(name);
    let stranger =
        ClientOptions::from_files(&url, &pki("ca.crt"), &strange("driver.crt"), &strange("driver.key"));
    let wary = ClientOptions::from_files(&url, &strange("ca.crt"), &pki("driver.crt"), &pki("driver.key"));
    for options in [stranger, wary] {
        let error = Client::new(&options).unwrap().health().await.unwrap_err();
        assert!(matches!(error, ClientError::Connect { .. } | ClientError::Interrupted { .. }), "{error}");
    }
    assert!(matches!(
        Client::new(&ClientOptions::from_pki_dir("http://x", &site.path("pki"), Role::Operator)),
        Err(ClientError::Config(_))
    ));
    assert!(server.client.health().await.unwrap().healthy);
}

#[tokio::test]
async fn with_metrics_auth_only_clients_with_a_certificate_read_the_metrics() {
    let mut site = Site::new();
    site.flags = ["--metrics-auth", "certificate"].map(str::to_owned).to_vec();
    let server = site.ready(&[]).await;
    assert_eq!(server.ops("/metrics").await.0, 404);
    assert_eq!(server.ops("/healthz").await.0, 200);

    let read = |name: &str| fs::read(site.path("pki").join(name)).unwrap();
    let authority = reqwest::Certificate::from_pem(&read("ca.crt")).unwrap();
    let stranger = || reqwest::Client::builder().tls_certs_only([authority.clone()]);
    let identity = reqwest::Identity::from_pem(&[read("reader.crt"), read("reader.key")].concat()).unwrap();
    let url = format!("https://{}/metrics", server.api);
    let client = stranger().identity(identity).build().unwrap();
    let text = client.get(&url).send().await.unwrap().text().await.unwrap();
    assert!(text.contains("nestor_storage_infra_build_info"), "{text}");
    assert!(stranger().build().unwrap().get(&url).send().await.is_err());
}

#[tokio::test]
async fn the_role_in_a_certificate_decides_what_a_client_may_do() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let url = format!("https://{}", server.api);
    let pki = site.path("pki");
    let client = |role| Client::new(&ClientOptions::from_pki_dir(&url, &pki, role)).unwrap();
    let reader = client(Role::Reader);
    assert!(reader.get_volume(&volume("v")).await.unwrap().is_some());
    let refused = reader.delete_volume(&volume("v")).await.unwrap_err();
    let problem = refused.problem().unwrap();
    assert_eq!((problem.status, problem.code), (403, ProblemCode::Forbidden), "{problem}");
    assert!(!refused.may_have_taken_effect());
    assert!(client(Role::Driver).delete_pool(&PoolName::new("pool").unwrap()).await.is_err());

    // The same certificate, issued again with another role.
    let issue = ["pki", "issue", "--role", "driver", "--name", "reader", "--overwrite", "--dir", text(&pki)];
    assert!(run(&issue).status.success());
    client(Role::Reader).delete_volume(&volume("v")).await.unwrap();
    let (_, metrics) = server.ops("/metrics").await;
    for certificate in ["server", "client-ca"] {
        let sample = format!(
            "nestor_storage_infra_certificate_expiry_timestamp_seconds{{certificate=\"{certificate}\"}}"
        );
        assert!(metrics.contains(&sample), "{metrics}");
    }
}

#[tokio::test]
async fn the_server_reports_health_and_events_and_stops_on_sigterm() {
    let site = Site::new();
    let server = site.ready(&[]).await;
    let mut events = server.client.events().await.unwrap();
    server.client.put_volume(&volume("v"), &size(MIB), SOON).await.unwrap();
    let first = tokio::time::timeout(SOON, events.next()).await.unwrap().unwrap().unwrap();
    assert_eq!((first.kind, first.id.as_str(), first.change), (EventKind::Volume, "v", Change::Created));
    for path in ["/healthz", "/readyz"] {
        assert_eq!(server.ops(path).await.0, 200, "{path}");
    }
    let (_, metrics) = server.ops("/metrics").await;
    for line in [
        r#"nestor_storage_infra_requests_total{method="PUT",route="/v1/volumes/{id}",code="201"} 1"#,
        r#"nestor_storage_infra_pool_reserved_bytes{pool="pool"} 1048576"#,
        r#"nestor_storage_infra_hypervisor_reachable{hypervisor="here"} 1"#,
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    // An open event stream must not delay the shutdown.
    let fresh = site.client(server.api);
    assert_eq!(server.stop(), Some(0));
    assert!(matches!(fresh.health().await.unwrap_err(), ClientError::Connect { .. }));
    assert!(tokio::time::timeout(SOON, events.collect::<Vec<_>>()).await.is_ok());
}

#[tokio::test]
async fn a_server_that_does_not_answer_differs_from_one_that_is_not_reachable() {
    let site = Site::new();
    // Accepts connections and never answers.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}", silent.local_addr().unwrap());
    let mut options = ClientOptions::from_pki_dir(&url, &site.path("pki"), Role::Operator);
    options.connect_timeout = Duration::from_millis(200);
    let error = Client::new(&options).unwrap().health().await.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }) && !error.may_have_taken_effect(), "{error}");
    drop(silent);
    let error = Client::new(&options).unwrap().health().await.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn the_command_line_works_and_reports_errors_in_one_line() {
    let site = Site::new();
    let again = run(&["pki", "init", "--dir", text(&site.path("pki")), "--host", "x"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("nothing was written"));
    let mode = fs::metadata(site.path("pki/operator.key")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(run(&["volume", "fly"]).status.code(), Some(2));

    let server = site.ready(&[]).await;
    let url = format!("https://{}", server.api);
    let (ca, cert, key) =
        (site.path("pki/ca.crt"), site.path("pki/operator.crt"), site.path("pki/operator.key"));
    let access = [
        "--infra-url",
        &url,
        "--infra-ca",
        text(&ca),
        "--infra-cert",
        text(&cert),
        "--infra-key",
        text(&key),
    ];
    let cli = |arguments: &[&str]| {
        let output = run(&[arguments, &access].concat());
        let out = String::from_utf8(output.stdout).unwrap();
        (output.status.code().unwrap(), out, String::from_utf8(output.stderr).unwrap())
    };
    let (status, out, _) = cli(&["volume", "create", "v", "--size", "5Mi"]);
    assert_eq!(status, 0);
    assert!(out.starts_with("ID ") && out.contains("5Mi"), "{out}");
    let (_, out, _) = cli(&["volume", "list", "-o", "json"]);
    let listed: Vec<infra_api::Volume> = serde_json::from_str(&out).unwrap();
    assert_eq!(listed[0].capacity_bytes, 5 * MIB);
    let (_, out, _) = cli(&["pool", "cordon", "pool", "-o", "json"]);
    assert!(out.contains("\"cordoned\": true"), "{out}");
    let (status, _, err) = cli(&["volume", "create", "w", "--size", "1Mi"]);
    assert_eq!((status, err.lines().count()), (1, 1), "{err}");
    assert!(err.contains("1 cordoned"), "{err}");
    let node = uuid::Uuid::new_v4().to_string();
    let (status, _, err) = cli(&["node", "register", &node, "--name", "n", "--hypervisor", "none"]);
    assert!(status == 1 && err.contains("this server has: here"), "{err}");
    assert_eq!(cli(&["pool", "uncordon", "pool"]).0, 0);
    let (_, out, _) = cli(&["volume", "qos", "v", "--iops", "100", "--bytes-per-second", "2Mi"]);
    assert!(out.contains("100/s,2MiB/s"), "{out}");
    let (status, out, err) = cli(&["snapshot", "create", "s", "--volume", "v"]);
    assert!(status == 0 && out.contains("ready"), "{out}{err}");
    let (status, out, err) = cli(&[
        "volume",
        "create",
        "w",
        "--size",
        "6Mi",
        "--from-snapshot",
        "s",
        "--shareable",
        "--iops",
        "5",
    ]);
    assert!(status == 0 && out.contains("snapshot s") && out.contains("5/s"), "{out}{err}");
    let (status, out, _) =
        cli(&["volume", "create", "x", "--size", "5Mi", "--from-volume", "v", "-o", "json"]);
    assert!(status == 0 && out.contains(r#""volume": "v""#), "{out}");
    let (_, out, _) = cli(&["snapshot", "list", "--volume", "v"]);
    assert!(out.starts_with("ID ") && out.lines().count() == 2, "{out}");
    assert_eq!(cli(&["snapshot", "show", "s"]).0, 0);
    let (_, out, _) = cli(&["volume", "show", "v"]);
    assert!(out.lines().next().unwrap().ends_with("CONDITION") && out.trim_end().ends_with("ok"), "{out}");
    for verb in [
        ["snapshot", "delete", "s"],
        ["volume", "delete", "w"],
        ["volume", "delete", "x"],
        ["volume", "delete", "v"],
        ["pool", "remove", "pool"],
    ] {
        assert_eq!(cli(&verb).0, 0, "{verb:?}");
    }
}
