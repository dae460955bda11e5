//! rutabaga_gfx in front of the drop-in: contexts, blobs, maps, commands and fences, as libkrun and crosvm make them.
#![allow(clippy::unwrap_used)]

use rutabaga_gfx::{
    RUTABAGA_BLOB_FLAG_USE_MAPPABLE, RUTABAGA_BLOB_MEM_HOST3D, RUTABAGA_FLAG_FENCE,
    RUTABAGA_FLAG_INFO_RING_IDX, RUTABAGA_MAP_ACCESS_RW, RUTABAGA_MAP_CACHE_CACHED, ResourceCreate3D,
    ResourceCreateBlob, Rutabaga, RutabagaBuilder, RutabagaFence, RutabagaFenceHandler, RutabagaHandle,
};
use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const CAPSET_VENUS: u32 = 4;
const CAPSET_APIR: u32 = 10;
/// virtio-gpu's number for a descriptor of plain shared memory, as the crate numbers it.
const SHARED_MEMORY: u32 = 4;
/// Set in the process that loads the drop-in.
const CHILD: &str = "APIR_TEST_RUTABAGA";

fn folder(variable: &str) -> PathBuf {
    std::env::var_os(variable)
        .unwrap_or_else(|| panic!("{variable} is not set: cargo xtask test sets it"))
        .into()
}

#[test]
fn a_guests_life_through_the_published_crate() {
    if std::env::var_os(CHILD).is_some() {
        return guest();
    }
    let (dist, llama) = (folder("APIR_DIST"), folder("APIR_LLAMA_DIR"));
    // Its plugin and its worker are found beside the drop-in.
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_guests_life_through_the_published_crate", "--nocapture"])
        .env_remove("APIR_WORKER")
        .env_remove("VIRGL_APIR_BACKEND_LIBRARY")
        .env("LD_LIBRARY_PATH", dist)
        .env("APIR_CHAIN", "none")
        .env("APIR_LLAMA_CPP_GGML_LIBRARY_PATH", llama.join("libggml-cpu.so"))
        .env("APIR_LLAMA_CPP_GGML_LIBRARY_REG", "ggml_backend_cpu_reg")
        .env(CHILD, "1")
        .output()
        .unwrap();
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}", output.status);
}

fn guest() {
    let fences = Arc::<Mutex<Vec<RutabagaFence>>>::default();
    let told = fences.clone();
    let handler = RutabagaFenceHandler::new(move |fence| told.lock().unwrap().push(fence));
    let mut rutabaga =
        RutabagaBuilder::new(1 << CAPSET_VENUS, handler).set_use_render_server(true).build().unwrap();
    assert_eq!(rutabaga.get_num_capsets(), 1);
    assert_eq!(rutabaga.get_capset_info(0).unwrap(), (CAPSET_VENUS, 0, 24));
    let caps = rutabaga.get_capset(CAPSET_VENUS, 0).unwrap();
    assert_eq!((caps.len(), &caps[..8]), (24, &[1, 0, 0, 0, 1, 0, 0, 0][..]));

    // The guest's console.
    let picture = ResourceCreate3D {
        target: 2,
        format: 2,
        bind: 2,
        width: 64,
        height: 64,
        depth: 1,
        array_size: 1,
        last_level: 0,
        nr_samples: 0,
        flags: 0,
    };
    rutabaga.resource_create_3d(900, picture).unwrap();

    // Capset 10 is unknown to the crate, which hands it on; 4 is what its VMMs can offer their guests.
    for round in 0..3 {
        let one = Context::open(&mut rutabaga, 1, CAPSET_APIR);
        let two = Context::open(&mut rutabaga, 2, CAPSET_VENUS);
        for context in [&one, &two] {
            context.handshake_and_load(&mut rutabaga);
        }
        for _ in 0..10 {
            one.count_devices(&mut rutabaga);
            two.count_devices(&mut rutabaga);
        }
        if round == 1 {
            one.memory_is_the_same_by_every_way(&mut rutabaga);
        }
        one.fence(&mut rutabaga, &fences);
        one.close(&mut rutabaga);
        two.count_devices(&mut rutabaga);
        two.close(&mut rutabaga);
    }
    rutabaga.unref_resource(900).unwrap();
}

/// A guest's context with its reply blob.
struct Context {
    id: u32,
    offset: u32,
    resource: u32,
    reply: Memory,
}

#[derive(Clone, Copy)]
struct Memory {
    address: usize,
    size: u64,
}

impl Memory {
    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset as u64 + 4 <= self.size);
        // SAFETY: inside a mapping that the test keeps.
        unsafe { &*((self.address + offset) as *const AtomicU32) }
    }
}

impl Context {
    fn open(rutabaga: &mut Rutabaga, id: u32, capset: u32) -> Self {
        rutabaga.create_context(id, capset, Some("test")).unwrap();
        let resource = id * 100;
        create_blob(rutabaga, id, resource, 0x4000);
        let mapping = rutabaga.map(resource).unwrap();
        assert_eq!(mapping.size, 0x4000);
        assert_eq!(rutabaga.map_info(resource).unwrap(), RUTABAGA_MAP_CACHE_CACHED | RUTABAGA_MAP_ACCESS_RW);
        let reply = Memory { address: mapping.ptr as usize, size: mapping.size };
        Self { id, offset: if capset == CAPSET_VENUS { 331 } else { 0 }, resource, reply }
    }

    fn call(&self, rutabaga: &mut Rutabaga, type_: u32, flags: u32, words: &[u32]) -> u32 {
        let mut command = vec![type_ + self.offset, flags, self.resource];
        command.extend(words);
        let mut command: Vec<u8> = command.iter().flat_map(|word| word.to_le_bytes()).collect();
        let answer = self.reply.word(0);
        answer.store(0, Ordering::Release);
        rutabaga.submit_command(self.id, &mut command, &[]).unwrap();
        eventually("an answer", || answer.load(Ordering::Acquire) != 0);
        answer.load(Ordering::Acquire)
    }

    fn handshake_and_load(&self, rutabaga: &mut Rutabaga) {
        assert_eq!(self.call(rutabaga, 0, 0, &[0, 2]), 0xab1f);
        assert_eq!(self.call(rutabaga, 1, 0, &[]), 1);
    }

    /// The protocol's command 0, forwarded to the plugin.
    fn count_devices(&self, rutabaga: &mut Rutabaga) {
        assert_eq!(self.call(rutabaga, 2, 0, &[]), 5);
        assert_eq!(self.reply.word(4).load(Ordering::Relaxed), 1);
    }

    fn memory_is_the_same_by_every_way(&self, rutabaga: &mut Rutabaga) {
        create_blob(rutabaga, self.id, 7, 8192);
        let RutabagaHandle::MagmaGpuHandle(handle) = rutabaga.export_blob(7).unwrap() else {
            panic!("a handle of another kind");
        };
        assert_eq!(handle.handle_type, SHARED_MEMORY);
        // SAFETY: the descriptor was the handle's alone.
        let file = unsafe {
            File::from_raw_fd(rutabaga_gfx::RutabagaIntoRawDescriptor::into_raw_descriptor(handle.os_handle))
        };
        file.write_all_at(&77u32.to_le_bytes(), 4096).unwrap();
        let window = memmap2::MmapOptions::new().len(8192).map_anon().unwrap();
        rutabaga.map_placed(7, window.as_ptr() as u64).unwrap();
        assert_eq!(window[4096], 77);
        let mapping = rutabaga.map(7).unwrap();
        let memory = Memory { address: mapping.ptr as usize, size: mapping.size };
        assert_eq!(memory.word(4096).load(Ordering::Relaxed), 77);
        rutabaga.unmap(7).unwrap();
        rutabaga.context_detach_resource(self.id, 7).unwrap();
        rutabaga.unref_resource(7).unwrap();
    }

    fn fence(&self, rutabaga: &mut Rutabaga, told: &Mutex<Vec<RutabagaFence>>) {
        told.lock().unwrap().clear();
        let of_context = RutabagaFence {
            flags: RUTABAGA_FLAG_FENCE | RUTABAGA_FLAG_INFO_RING_IDX,
            fence_id: 1 << 33,
            ctx_id: self.id,
            ring_idx: 0,
        };
        rutabaga.create_fence(of_context).unwrap();
        rutabaga
            .create_fence(RutabagaFence { flags: RUTABAGA_FLAG_FENCE, fence_id: 5, ctx_id: 0, ring_idx: 0 })
            .unwrap();
        eventually("both fences", || told.lock().unwrap().len() == 2);
        let ids: Vec<_> = told.lock().unwrap().iter().map(|fence| (fence.ctx_id, fence.fence_id)).collect();
        assert_eq!(ids, [(self.id, 1 << 33), (0, 5)]);
    }

    fn close(&self, rutabaga: &mut Rutabaga) {
        rutabaga.unmap(self.resource).unwrap();
        rutabaga.context_detach_resource(self.id, self.resource).unwrap();
        rutabaga.unref_resource(self.resource).unwrap();
        rutabaga.destroy_context(self.id).unwrap();
    }
}

fn create_blob(rutabaga: &mut Rutabaga, context: u32, resource: u32, size: u64) {
    let blob = ResourceCreateBlob {
        blob_mem: RUTABAGA_BLOB_MEM_HOST3D,
        blob_flags: RUTABAGA_BLOB_FLAG_USE_MAPPABLE,
        blob_id: 0,
        size,
    };
    rutabaga.resource_create_blob(context, resource, blob, None, None).unwrap();
    rutabaga.context_attach_resource(context, resource).unwrap();
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
