//! Mutual TLS.

use onefold_tests::Dir;

use crate::fleet::{Fleet, contents};

fn options(certificate: &str, authority: &str) -> String {
    format!(
        "--tls-certificate {certificate}.pem --tls-key {certificate}.key --tls-authority {authority}-ca.pem"
    )
}

#[test]
fn all_connections_may_be_mutual_tls() {
    let dir = Dir::new();
    dir.command("onefold-data generate --workload rm1 --samples 500 --seed 4 --out logs").works();
    dir.command("onefold-ingest build logs/dataset.toml --buckets 4 --out here --threads 2").works();
    dir.certificate("ours", "ours", 2);
    dir.certificate("theirs", "theirs", 2);
    let fleet = Fleet::with(&dir, 2, None, &options("ours", "ours"));
    fleet.command("build logs/dataset.toml --buckets 4 --out there").json();
    assert_eq!(contents(&dir.path("there")), contents(&dir.path("here")));

    let build = "onefold-cluster build logs/dataset.toml --out other --scheduler";
    let address = fleet.address();
    // A certificate that another authority signed, the wrong authority for the scheduler's certificate, and no TLS.
    for options in [options("theirs", "ours"), options("ours", "theirs"), String::new()] {
        let output = dir.command(&format!("{build} {address} {options}")).with_time_limit(300).output();
        let error = String::from_utf8_lossy(&output.stderr);
        let refused = !output.status.success() && error.contains(&address) && error.contains("hint: ");
        assert!(refused, "{options}: {error}");
        assert!(!dir.path("other/snapshots").exists());
    }
    let half = dir.command(&format!("{build} {address} --tls-certificate ours.pem")).output();
    assert_eq!(half.status.code(), Some(2), "a certificate needs its key");
}
