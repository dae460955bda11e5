//! The ggml library that a setting names: a file, or the best for this processor of those in a folder or of a pattern's.
//!
//! Distributions ship the CPU backend in variants, each for other instructions, and a variant tells how well it fits. Each is asked in
//! a process of its own: what is in a library runs when it is loaded.
#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// What a folder stands for.
const BACKENDS: &[u8] = b"libggml-*.so";
/// How long a library may take to be loaded and asked.
const ASK_LIMIT: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(1);

/// What a library said when it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// It is a variant with this score; 0 when it cannot run here.
    Variant(i32),
    /// It is a backend of which there is one variant.
    Backend,
    /// It is something else, or cannot be loaded.
    Other,
}

/// The library's file.
///
/// # Errors
/// Why there is none, or no best one; the text is put behind the path.
pub(crate) fn choose(program: &Path, named: &Path) -> Result<PathBuf, String> {
    let pattern = named.file_name().map(OsStr::as_bytes).filter(|name| name.contains(&b'*'));
    let (folder, pattern) = match pattern {
        _ if named.is_dir() => (named, BACKENDS),
        Some(pattern) => {
            (named.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new(".")), pattern)
        }
        None => return Ok(named.to_owned()),
    };
    let entries =
        fs::read_dir(folder).map_err(|cause| format!("cannot list {}: {cause}", folder.display()))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names: Vec<_> = names.filter(|name| matches(pattern, name.as_bytes())).collect();
    names.sort();
    if names.is_empty() {
        return Err(format!("no file {} in {}", OsStr::from_bytes(pattern).display(), folder.display()));
    }
    let answers: Vec<_> = names.iter().map(|name| ask(program, &folder.join(name))).collect();
    let of = |wanted: fn(Answer) -> bool| {
        let found = names.iter().zip(&answers).filter(move |(_, answer)| wanted(**answer));
        found.map(|(name, _)| name).collect::<Vec<_>>()
    };
    let list = |names: &[&std::ffi::OsString]| {
        names.iter().map(|name| name.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    let scores = names.iter().zip(&answers).filter_map(|(name, answer)| match answer {
        Answer::Variant(score @ 1..) => Some((*score, name)),
        _ => None,
    });
    // The first of equals, by name.
    if let Some((_, name)) = scores.rev().max_by_key(|(score, _)| *score) {
        return Ok(folder.join(name));
    }
    let variants = of(|answer| matches!(answer, Answer::Variant(_)));
    if !variants.is_empty() {
        return Err(format!("no variant runs on this processor: {}", list(&variants)));
    }
    match of(|answer| answer == Answer::Backend).as_slice() {
        [] => Err(format!("no ggml backend among {}", list(&names.iter().collect::<Vec<_>>()))),
        [one] => Ok(folder.join(one)),
        several => Err(format!("several ggml backends, name one: {}", list(several))),
    }
}

/// Whether a name matches a pattern in which `*` stands for any bytes.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    match pattern.split_first() {
        None => name.is_empty(),
        Some((b'*', rest)) => (0..=name.len()).any(|skipped| matches(rest, &name[skipped..])),
        Some((byte, rest)) => {
            name.split_first().is_some_and(|(first, others)| first == byte && matches(rest, others))
        }
    }
}

/// Asks one library, in a process of its own.
fn ask(program: &Path, library: &Path) -> Answer {
    let mut command = Command::new(program);
    command.arg("score").arg(library).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut run = || -> io::Result<String> {
        let mut process = command.spawn()?;
        let end = Instant::now() + ASK_LIMIT;
        while process.try_wait()?.is_none() {
            if Instant::now() >= end {
                process.kill()?;
                process.wait()?;
            }
            thread::sleep(STEP);
        }
        let mut text = String::new();
        if let Some(mut output) = process.stdout.take() {
            output.read_to_string(&mut text)?;
        }
        Ok(text)
    };
    parse(run().unwrap_or_default().trim())
}

fn parse(text: &str) -> Answer {
    match (text, text.strip_prefix("variant ").and_then(|score| score.parse().ok())) {
        (_, Some(score)) => Answer::Variant(score),
        ("backend", None) => Answer::Backend,
        _ => Answer::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn patterns() {
        for (pattern, name, is_match) in [
            ("libggml-*.so", "libggml-cpu-x64.so", true),
            ("libggml-*.so", "libggml-.so", true),
            ("libggml-*.so", "libggml-cpu.so.0", false),
            ("*-*", "a-b", true),
            ("*-*", "ab", false),
            ("a", "a", true),
            ("a", "ab", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), is_match, "{pattern} {name}");
        }
    }

    /// A folder of libraries that a script answers for: each holds its answer.
    #[test]
    fn t31_the_best_variant_is_chosen_and_what_is_none_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("apir");
        fs::write(
            &script,
            "#!/bin/sh\nread answer < \"$2\"; case $answer in die) kill -ILL $$;; esac; echo $answer\n",
        )
        .unwrap();
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
        let chosen = |files: &[(&str, &str)], named: &str| {
            let libraries = tempfile::tempdir_in(folder.path()).unwrap();
            for (name, answer) in files {
                fs::write(libraries.path().join(name), format!("{answer}\n")).unwrap();
            }
            choose(&script, &libraries.path().join(named))
                .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        };
        let variants = [
            ("libggml-cpu-a.so", "variant 4"),
            ("libggml-cpu-b.so", "variant 16"),
            ("libggml-cpu-c.so", "variant 16"),
            ("libggml-cpu-d.so", "variant 0"),
            ("libggml-cpu-e.so", "die"),
            ("libggml-base.so", "other"),
            ("libggml-vulkan.so", "backend"),
            ("libllama.so", "variant 99"),
        ];
        assert_eq!(chosen(&variants, "").as_deref(), Ok("libggml-cpu-b.so"));
        assert_eq!(chosen(&variants, "libggml-cpu-*.so").as_deref(), Ok("libggml-cpu-b.so"));
        assert_eq!(chosen(&variants, "libggml-cpu-a*").as_deref(), Ok("libggml-cpu-a.so"));
        assert_eq!(chosen(&variants, "libggml-vulkan.so").as_deref(), Ok("libggml-vulkan.so"));
        assert_eq!(chosen(&variants[5..7], "").as_deref(), Ok("libggml-vulkan.so"));
        let error = |files, named| chosen(files, named).unwrap_err();
        assert!(error(&variants, "libggml-cuda*").starts_with("no file libggml-cuda* in "));
        assert_eq!(error(&variants[3..4], ""), "no variant runs on this processor: libggml-cpu-d.so");
        assert_eq!(error(&variants[4..6], ""), "no ggml backend among libggml-base.so, libggml-cpu-e.so");
        let two = [("libggml-cuda.so", "backend"), ("libggml-vulkan.so", "backend")];
        assert_eq!(error(&two, ""), "several ggml backends, name one: libggml-cuda.so, libggml-vulkan.so");
    }
}
