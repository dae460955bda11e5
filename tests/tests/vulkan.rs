//! ggml's Vulkan backend on a driver that compiles its kernels at run time: Mesa's lavapipe, on the processor.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    dead_code,
    reason = "a test's helpers fail the test"
)]

#[path = "rows/harness.rs"]
mod harness;
#[path = "../../host/tests/plugin/scene.rs"]
mod scene;

use apir_tests::peers::{Dist, vulkan_library};
use apir_tests::process;
use apir_tests::program::Program;
use apir_tests::server::{Serve, Server};
use harness::Guest;
use scene::*;
use std::fs;
use std::path::Path;
use std::time::Duration;

const OP_FLASH_ATTN_EXT: u32 = 74;
/// What a device that poses as a processor needs to be taken, and the only driver.
const VARIABLES: [(&str, &str); 2] =
    [("GGML_VK_VISIBLE_DEVICES", "0"), ("VK_DRIVER_FILES", "/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")];
/// Longer than a compiler takes for a layer on a busy machine.
const LIMIT: Duration = Duration::from_secs(1200);
/// The descriptor of the memory that a worker's driver takes for its own cache, and what it puts there first.
const OWN_CACHE: &str = "300";
const HEADER: u64 = 16;

fn start(variables: &[(&str, &str)]) -> Server {
    let serve = Serve::new(&Dist::from_env().unwrap(), &vulkan_library().unwrap());
    let all = VARIABLES.iter().chain(variables);
    all.fold(serve, |serve, (key, value)| serve.env(key, value)).start().unwrap()
}

/// Flash attention of one token in the layout that llama.cpp gives it: 4 heads of 64, keys and values of 2 heads in 256 cells.
fn attention(guest: &mut Guest) -> Vec<u8> {
    let buffer = guest.buffer(1 << 20);
    let mut scene = Scene::new(buffer);
    let query = scene.leaf(TYPE_F32, &[64, 1, 4]);
    let [key, value] = [(); 2].map(|()| {
        let id = scene.leaf(TYPE_F16, &[64, 256, 2]);
        // Heads lie side by side in a cell.
        scene.get(id).nb = [2, 256, 128, 65_536];
        id
    });
    let mask = scene.leaf(TYPE_F16, &[256, 64]);
    // Scale, and no precision asked for: the kernel then calls functions of the math library.
    let params = [0.125f32.to_bits().cast_signed()];
    let result = scene.node(OP_FLASH_ATTN_EXT, TYPE_F32, &[64, 4, 1], &[query, key, value, mask], &params);
    let number = |index: usize| (index * 37 % 17) as f32 / 8.0 - 1.0;
    let floats: Vec<f32> = (0..64 * 4).map(number).collect();
    guest.set(*scene.get(query), &bytes(&floats));
    // 0.5, -0.5, 1, -1, 0 of 16 bits.
    let halves = [0x3800u16, 0xb800, 0x3c00, 0xbc00, 0];
    for (id, step) in [(key, 7), (value, 11)] {
        let cells: Vec<u8> = (0..64 * 256 * 2).flat_map(|i| halves[i * step / 3 % 5].to_le_bytes()).collect();
        guest.set(*scene.get(id), &cells);
    }
    guest.set(*scene.get(mask), &[0; 256 * 64 * 2]);
    assert_eq!(scene.compute(guest), Ok(0));
    guest.get(*scene.get(result), 64 * 4 * 4)
}

/// Bytes that the driver of the only worker has put into its own cache: those of what it had to compile.
fn compiled(server: &Server) -> u64 {
    let path = format!("/proc/{}/fd/{OWN_CACHE}", server.workers()[0]);
    fs::metadata(path).unwrap().len()
}

fn warm(cache: &Path) {
    let warm = Program::new(&Dist::from_env().unwrap().apir())
        .args(["warm", "--weights", "q4_0", "--heads", "64", "--tokens", "1", "--ggml-library"])
        .arg(vulkan_library().unwrap())
        .arg("--plugin")
        .arg(Dist::from_env().unwrap().plugin())
        .arg("--cache")
        .arg(cache)
        .envs(VARIABLES.iter().map(|(key, value)| (key.into(), value.into())));
    let told = warm.run(LIMIT).unwrap().success().unwrap().stderr;
    assert!(told.contains("the cache of shaders is filled: "), "{told}");
    assert!(told.contains("3 layers computed, 0 not supported, 0 failed"), "{told}");
}

/// What a worker computes is the same to the last bit; one with a cache compiles nothing for it.
#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t30_code_compiled_at_run_time_and_caches_of_it_in_a_strict_worker() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    warm(&cache);

    let warmed = start(&[("APIR_SHADER_CACHE", cache.to_str().unwrap())]);
    let mut guest = Guest::of(&warmed);
    guest.load();
    let with_cache = attention(&mut guest);
    // It writes from a thread of its own.
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(compiled(&warmed), HEADER, "a worker with a cache compiles nothing that is in it");
    // The control: what is not in it is compiled, and seen.
    let buffer = guest.buffer(4096);
    let square = node(2, buffer, 64, 4, OP_SQR, &[1]);
    guest.set(row(1, buffer, 0, 4), &bytes(&[3.0; 4]));
    assert_eq!(guest.compute(&[2], &[row(1, buffer, 0, 4), square]), Ok(0));
    assert_eq!(floats(&guest.get(square, 16)), [9.0; 4]);
    assert!(process::wait_until(Duration::from_secs(20), || compiled(&warmed) > HEADER));
    // The cache of all is as it was.
    assert!(
        fs::read_dir(&cache)
            .unwrap()
            .all(|entry| { entry.unwrap().file_name().to_string_lossy().starts_with("shaders-") })
    );
    drop(guest);
    assert!(!warmed.stderr().contains("signal:"), "{}", warmed.stderr());
    drop(warmed);

    let cold = start(&[]);
    let mut guest = Guest::of(&cold);
    guest.load();
    assert_eq!(attention(&mut guest), with_cache, "without a cache");
    drop(guest);
    assert!(!cold.stderr().contains("signal:"), "{}", cold.stderr());
    drop(cold);

    let home = folder.path().to_str().unwrap();
    let open = start(&[("APIR_SANDBOX", "off"), ("MESA_SHADER_CACHE_DIR", home)]);
    let mut guest = Guest::of(&open);
    guest.load();
    assert_eq!(attention(&mut guest), with_cache, "without a sandbox");
    assert!(floats(&with_cache).iter().all(|float| float.is_finite() && *float != 0.0));
}
