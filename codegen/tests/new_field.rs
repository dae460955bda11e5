//! A field added to the specification reaches protocol, host, guest and docs, and all of them build, with no other edit.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates that are generated into, and those that they or their tests need.
const MEMBERS: [&str; 5] = ["protocol", "ggml", "host", "guest", "tests/guard"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    } else {
        fs::copy(from, to).unwrap();
    }
}

/// A workspace of [`MEMBERS`].
fn workspace_copy(to: &Path) {
    for part in MEMBERS.iter().copied().chain(["docs", "Cargo.lock", "clippy.toml"]) {
        copy(&root().join(part), &to.join(part));
    }
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members: Vec<_> = manifest
        .lines()
        .map(|line| match line.starts_with("members = ") {
            true => format!("members = {MEMBERS:?}"),
            false => line.to_owned(),
        })
        .collect();
    fs::write(to.join("Cargo.toml"), members.join("\n")).unwrap();
}

#[test]
fn a_new_field_reaches_every_crate_and_all_of_them_build() {
    let folder = tempfile::tempdir().unwrap();
    workspace_copy(folder.path());
    assert!(apir_codegen::run(folder.path(), true).unwrap().is_empty(), "the checked-in files are stale");

    let spec = folder.path().join("protocol/commands.toml");
    let text = fs::read_to_string(&spec).unwrap();
    let command = "name = \"device_get_device_count\"\n";
    assert_eq!(text.matches(command).count(), 1);
    let field = r#"request = [{ name = "registry", type = "u32", doc = "which registry" }]"#;
    fs::write(&spec, text.replace(command, &format!("{command}{field}\n"))).unwrap();

    let stale = apir_codegen::run(folder.path(), true).unwrap();
    let paths: Vec<_> = stale.iter().map(|output| output.path).collect();
    assert_eq!(
        paths,
        ["protocol/src/generated.rs", "docs/protocol.md"],
        "calls and handlers take whole requests"
    );
    let diff: String = stale.iter().map(apir_codegen::Output::diff).collect();
    assert!(diff.contains("+        pub registry: u32,"), "{diff}");
    assert!(diff.contains("+            encoder.u32(self.registry)?;"), "{diff}");
    assert!(diff.contains("+| request | registry | u32 | 4 | which registry |"), "{diff}");

    apir_codegen::run(folder.path(), false).unwrap();
    assert!(apir_codegen::run(folder.path(), true).unwrap().is_empty());
    let build = Command::new(env!("CARGO"))
        .args(["check", "--quiet", "--offline", "--workspace"])
        .current_dir(folder.path())
        // Kept between runs, since the dependencies stay the same.
        .env("CARGO_TARGET_DIR", Path::new(env!("CARGO_TARGET_TMPDIR")).join("new-field"))
        .output()
        .unwrap();
    assert!(build.status.success(), "{}", String::from_utf8_lossy(&build.stderr));
}
