//! Contexts driven directly, with a plugin that misbehaves on demand.
#![allow(missing_docs, clippy::unwrap_used)]

use apir_protocol::socket::BlobRefusal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use virglrenderer::{Config, Context, Error, Fatal};

fn fake_plugin() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().parent().unwrap().join("examples/libfake_plugin.so")
}

struct Guest {
    context: Context,
    reply: u32,
    memory: File,
}

impl Guest {
    fn new(config: Config) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let mut context = Context::new(NEXT.fetch_add(1, Ordering::Relaxed), config).unwrap();
        let blob = context.create_blob(100).unwrap();
        assert_eq!(blob.size % 4096, 0);
        Self { context, reply: blob.res_id, memory: blob.memory.into() }
    }

    fn with_plugin() -> Self {
        let mut guest = Self::new(Config::default().plugin(fake_plugin()));
        assert_eq!(guest.load(), Ok(1));
        guest
    }

    fn submit(&mut self, words: &[u32]) -> Result<u32, Fatal> {
        let mut command: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.memory.write_at(&[0; 4], 0).unwrap();
        self.context.submit(&mut command)?;
        Ok(self.word(0))
    }

    fn load(&mut self) -> Result<u32, Fatal> {
        self.submit(&[1, 0, self.reply])
    }

    fn forward(&mut self, command: u32, arguments: &[u32]) -> Result<u32, Fatal> {
        let mut words = vec![2, command, self.reply];
        words.extend(arguments);
        self.submit(&words)
    }

    fn word(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.memory.read_exact_at(&mut bytes, offset).unwrap();
        u32::from_le_bytes(bytes)
    }
}

#[test]
fn handshake_answers_magic_and_version_in_both_forms() {
    let mut guest = Guest::new(Config::default());
    for offset in [0, 331] {
        assert_eq!(guest.submit(&[offset, 0, guest.reply, 0, 1]), Ok(0xab1f));
        assert_eq!((guest.word(4), guest.word(8)), (0, 2));
    }
    // Another major version is the guest's to refuse.
    assert_eq!(guest.submit(&[0, 0, guest.reply, 9, 9]), Ok(0xab1f));
}

#[test]
fn load_library_codes_are_those_of_virglrenderer() {
    assert_eq!(Guest::new(Config::default()).load(), Ok(1 + 3));
    let folder = tempfile::tempdir().unwrap();
    let not_elf = folder.path().join("plugin.so");
    std::fs::write(&not_elf, "no library").unwrap();
    assert_eq!(Guest::new(Config::default().plugin(not_elf)).load(), Ok(1 + 4));
    assert_eq!(Guest::new(Config::default().plugin("libc.so.6")).load(), Ok(1 + 5));
    for (code, word) in [(0, 1), (6, 1), (1, 1 + 7), (100, 1 + 106), (u32::MAX, 1 + 1)] {
        let config = Config::default().plugin(fake_plugin());
        let mut guest = Guest::new(config.set("ggml.library.reg", format!("code={code}")).unwrap());
        assert_eq!(guest.load(), Ok(word), "initialize returned {code}");
        assert_eq!(guest.load(), Ok(1 + 2));
        let forward = if word == 1 { 5 } else { 1 + 1 };
        assert_eq!(guest.forward(0, &[]), Ok(forward), "initialize returned {code}");
    }
}

#[test]
fn forward_carries_arguments_reply_and_code() {
    let mut guest = Guest::with_plugin();
    assert_eq!(guest.forward(1, &[7, 8]), Ok(5));
    assert_eq!((guest.word(4), guest.word(8)), (7, 8));
    assert_eq!(guest.forward(2, &[96]), Ok(1 + 4 + 96));
    // Codes that would wrap, to "no answer" above all, become "no dispatch".
    for code in [0xffff_fffb, 0xffff_fffe, u32::MAX] {
        assert_eq!(guest.forward(2, &[code]), Ok(2));
    }
    // No cursor, one past the end, one before the start.
    for command in [3, 4, 9] {
        assert_eq!(guest.forward(command, &[]), Ok(2));
    }
}

#[test]
fn callbacks_find_blobs_and_configuration() {
    let config = Config::default().plugin(fake_plugin()).set("key", "value").unwrap();
    let mut guest = Guest::new(config);
    assert_eq!(guest.load(), Ok(1));
    let blob = guest.context.create_blob(1).unwrap();
    File::from(blob.memory).write_at(&77u32.to_le_bytes(), 0).unwrap();
    assert_eq!(guest.forward(7, &[blob.res_id]), Ok(5));
    assert_eq!(guest.word(4), 77);
    assert_eq!(guest.forward(8, &[u32::from_le_bytes(*b"key\0")]), Ok(5));
    assert_eq!(guest.word(4), u32::from_le_bytes(*b"valu"));
    assert_eq!(guest.forward(8, &[u32::from_le_bytes(*b"no\0\0")]), Ok(5));
    assert_eq!(guest.word(4), u32::from_le_bytes(*b"(non"));
    guest.context.unref_blob(blob.res_id);
    // A bad id is answered, then fatal.
    assert_eq!(guest.forward(7, &[blob.res_id]), Err(Fatal::UnknownBlob));
    assert_eq!(guest.word(0), 5);
}

#[test]
fn what_breaks_the_stream_is_fatal_and_unanswered() {
    let mut guest = Guest::with_plugin();
    let reply = guest.reply;
    for len in 0..3 {
        assert_eq!(guest.submit(&[2, 0, reply][..len]), Err(Fatal::Length { len: len * 4, least: 12 }));
    }
    assert_eq!(guest.submit(&[0, 0, reply, 0]), Err(Fatal::Length { len: 16, least: 20 }));
    assert_eq!(guest.submit(&[3, 0, reply]), Err(Fatal::CommandType(3)));
    assert_eq!(guest.submit(&[334, 0, reply]), Err(Fatal::CommandType(334)));
    assert_eq!(guest.submit(&[2, 0, 0]), Err(Fatal::ReplyBlob(0)));
    assert_eq!(guest.submit(&[2, 0, reply + 1]), Err(Fatal::ReplyBlob(reply + 1)));
    assert_eq!(guest.context.submit(&mut [0; 13]), Err(Fatal::Length { len: 13, least: 12 }));
    assert_eq!(guest.word(0), 0);
}

#[test]
fn resource_ids_are_never_used_twice_and_contexts_end_in_the_plugin() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("ggml.so");
    let config = Config::default().plugin(fake_plugin()).set("ggml.library.path", &library).unwrap();
    let mut guest = Guest::new(config);
    assert_eq!(guest.load(), Ok(1));
    let first = guest.context.create_blob(1).unwrap().res_id;
    guest.context.unref_blob(first);
    guest.context.unref_blob(first);
    assert_eq!(guest.context.create_blob(1).unwrap().res_id, first + 1);
    drop(guest);
    assert!(folder.path().join("ggml.so.ended").exists());
}

#[test]
fn a_context_id_belongs_to_one_context_at_a_time() {
    let first = Context::new(1 << 20, Config::default()).unwrap();
    assert!(matches!(Context::new(1 << 20, Config::default()), Err(Error::ContextExists { .. })));
    drop(first);
    assert!(Context::new(1 << 20, Config::default()).is_ok());
    assert!(matches!(Config::default().set("a\0", "b"), Err(Error::ConfigNul { .. })));
}

#[test]
fn s27_a_blob_of_2_to_46_bytes_is_refused_and_the_context_goes_on() {
    let mut guest = Guest::new(Config::default());
    for size in [1 << 46, 1 << 40, (64 << 30) + 1] {
        assert_eq!(guest.context.create_blob(size).unwrap_err(), BlobRefusal::Memory, "{size}");
    }
    let large = guest.context.create_blob(32 << 30).unwrap();
    assert_eq!(guest.context.create_blob(32 << 30).unwrap_err(), BlobRefusal::Memory, "with the reply page");
    guest.context.unref_blob(large.res_id);
    let large = guest.context.create_blob((64 << 30) - (1 << 20)).unwrap();
    guest.context.unref_blob(large.res_id);
    // Other contexts have theirs.
    let mut other = Guest::new(Config::default());
    assert!(other.context.create_blob(1 << 30).is_ok());
}
