use super::fake::{FakeLink, Host};
use super::*;
use crate::link::Pulse;
use apir_protocol::command::InitializeCode;
use apir_protocol::constants::FEATURE_LIVENESS;
use apir_protocol::handle::BufferHandle;
use apir_protocol::handle::BufferTypeHandle;
use apir_protocol::messages::{
    BufferTypeAllocBufferRequest, DeviceGetCountRequest, DeviceGetDescriptionRequest, DeviceGetNameRequest,
    DeviceGetTypeRequest,
};
use apir_protocol::tensor::TensorRecord;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

fn open() -> (Session, Arc<Host>) {
    let (link, host) = FakeLink::new();
    (Session::open(link).unwrap(), host)
}

#[test]
fn opening_shakes_hands_and_loads() {
    let (session, host) = open();
    assert_eq!(session.host_version(), (0, 1));
    assert_eq!(session.transport(), "fake");
    assert_eq!(host.0.lock().unwrap().types, [0, 1, 2]);
    assert_eq!(session.statistics(), Statistics { calls: 3, bytes: 52, graph_computes: 0 });
    drop(session);
    assert_eq!(host.0.lock().unwrap().unreferenced, [1, 2]);
}

#[test]
fn command_types_carry_the_links_offset() {
    let (mut link, host) = FakeLink::new();
    link.offset = 331;
    let session = Session::open(link).unwrap();
    session.device_get_count(&DeviceGetCountRequest {}).unwrap();
    assert_eq!(host.0.lock().unwrap().types, [331, 332, 333, 333]);
}

#[test]
fn a_wrong_handshake_is_no_host() {
    for found in [0, 1, HANDSHAKE_MAGIC - 1] {
        let (link, host) = FakeLink::new();
        host.0.lock().unwrap().handshake = found;
        let error = Session::open(link).unwrap_err();
        assert!(matches!(error, SessionError::Handshake { found: told } if told == found));
        assert!(error.to_string().contains("no APIR host"), "{error}");
    }
}

#[test]
fn every_load_code_is_one_line_with_what_and_fix() {
    let mut lines = Vec::new();
    for code in 1..50 {
        let (link, host) = FakeLink::new();
        host.0.lock().unwrap().load = code;
        let line = Session::open(link).unwrap_err().to_string();
        assert!(line.contains(&format!("(code {code}); ")) && !line.contains('\n'), "{line}");
        lines.push(line);
    }
    let says = |code: usize, what: &str| assert!(lines[code - 1].contains(what), "{}", lines[code - 1]);
    says(1, "could not start the call");
    says(2, "has loaded the plugin before");
    says(3, "No plugin path");
    says(3, "--plugin FILE");
    says(4, "plugin could not be opened");
    says(5, "lacks one of its entry points");
    says(9, "No ggml library is configured");
    says(10, "ggml library could not be opened");
    says(11, "--ggml-reg");
    says(11, "libggml-cpu.so");
    says(44, "A setting of the plugin");
    for code in 13..=21 {
        let known = InitializeCode::from_number(code as u32 - 12).unwrap();
        says(code, known.description());
    }
    for code in [6, 7, 8, 22, 39] {
        says(code, "unknown reason");
    }
}

#[test]
fn replies_are_decoded_short_and_long() {
    let (session, _) = open();
    assert_eq!(session.device_get_count(&DeviceGetCountRequest {}).unwrap().count, 1);
    assert_eq!(session.device_get_name(&DeviceGetNameRequest {}).unwrap().name, "Fake");
    let text = session.device_get_description(&DeviceGetDescriptionRequest {}).unwrap().description;
    assert_eq!(text.len(), 800);
}

#[test]
fn an_unanswered_property_is_true_and_an_answered_one_counts() {
    for (answer, read) in [(None, true), (Some(false), false), (Some(true), true)] {
        let (session, host) = open();
        host.0.lock().unwrap().mmap_support = answer;
        // Leaves zeros in the page.
        session.device_get_description(&DeviceGetDescriptionRequest {}).unwrap();
        let properties = session.properties().unwrap();
        assert_eq!((properties.reply.mmap_support, properties.tells_mmap_support), (read, answer.is_some()));
        assert!(!properties.reply.async_ && !properties.reply.events);
    }
}

#[test]
fn e6_a_refusal_says_why_on_one_bounded_line() {
    let refused = |features: u64, reason: Option<&str>| {
        let (link, host) = FakeLink::new();
        host.0.lock().unwrap().features = features;
        let session = Session::open(link).unwrap();
        {
            let mut script = host.0.lock().unwrap();
            script.refused.insert(Command::DeviceGetType, 1);
            script.reason = reason.map(str::to_owned);
        }
        // Leaves a text in the page, which is no reason.
        session.device_get_name(&DeviceGetNameRequest {}).unwrap();
        session.device_get_type(&DeviceGetTypeRequest {}).unwrap_err().to_string()
    };
    let said = refused(FEATURE_REASONS, Some("node 3: ADD breaks the rule: a\nb"));
    assert!(said.ends_with("(code 1): node 3: ADD breaks the rule: ab"), "{said}");
    let cut = refused(FEATURE_REASONS, Some(&"é".repeat(130)));
    assert!(cut.ends_with(&format!("(code 1): {}", "é".repeat(128))), "{cut}");
    for (features, reason) in [(FEATURE_REASONS, None), (FEATURE_LIVENESS, Some("why"))] {
        assert!(refused(features, reason).ends_with("(code 1); its output says why"));
    }
}

#[test]
fn refusals_name_the_command_and_the_session_goes_on() {
    let (session, host) = open();
    host.0.lock().unwrap().refused.insert(Command::DeviceGetType, 6);
    let error = session.device_get_type(&DeviceGetTypeRequest {}).unwrap_err();
    assert!(matches!(
        error,
        SessionError::Refused { command: Command::DeviceGetType, code: 6, reason: None }
    ));
    assert!(error.to_string().contains("device_get_type"), "{error}");
    session.device_get_count(&DeviceGetCountRequest {}).unwrap();
}

#[test]
fn a_lost_host_fails_this_call_and_every_later_one_at_once() {
    let (session, host) = open();
    host.0.lock().unwrap().gone = true;
    let start = std::time::Instant::now();
    for _ in 0..100 {
        let error = session.device_get_count(&DeviceGetCountRequest {}).unwrap_err();
        assert!(matches!(error, SessionError::Lost(_)), "{error}");
        assert!(session.set_tensor(BufferHandle(1), &TensorRecord::default(), 0, &[1]).is_err());
        assert!(matches!(session.create_blob(1), Err(SessionError::Lost(_))));
    }
    assert!(session.is_lost());
    assert!(start.elapsed() < Duration::from_secs(1));
}

#[test]
fn a_silent_host_is_lost_after_the_handshakes_deadline() {
    #[derive(Debug)]
    struct Silent(Box<FakeLink>);
    impl Link for Silent {
        fn transport(&self) -> &'static str {
            "silent"
        }
        fn command_type_offset(&self) -> u32 {
            0
        }
        fn create_blob(&self, size: u64) -> Result<Blob, LinkError> {
            self.0.create_blob(size)
        }
        fn submit(&self, _: &[u8]) -> Result<(), LinkError> {
            Ok(())
        }
        fn check_peer(&self) -> Result<(), LinkError> {
            Ok(())
        }
        fn pulse(&self) -> &Pulse {
            self.0.pulse()
        }
    }
    let error = Session::open(Box::new(Silent(FakeLink::new().0))).unwrap_err();
    assert!(error.to_string().contains("2000 ms"), "{error}");
}

#[test]
fn the_first_route_that_shakes_hands_is_taken() {
    let route = |name: &str, link: Option<Box<FakeLink>>| {
        Route::new(Some(name.into()), move || {
            link.map_or(Err(LinkError::NoTransport), |link| Ok(link as Box<dyn Link>))
        })
    };
    let ((wrong, one), (right, two), (unused, three)) = (FakeLink::new(), FakeLink::new(), FakeLink::new());
    one.0.lock().unwrap().handshake = 1;
    let routes =
        vec![route("a", None), route("b", Some(wrong)), route("c", Some(right)), route("d", Some(unused))];
    let session = Session::first(routes).unwrap();
    session.load_library().unwrap();
    assert_eq!(one.0.lock().unwrap().unreferenced, [1, 2]);
    assert_eq!(two.0.lock().unwrap().types, [0, 1]);
    assert!(three.0.lock().unwrap().types.is_empty());

    let (wrong, host) = FakeLink::new();
    host.0.lock().unwrap().handshake = 1;
    let line = Session::first(vec![route("a", None), route("b", Some(wrong))]).unwrap_err().to_string();
    assert!(
        line.contains("a: no apir host") && line.contains("; b: the handshake was answered with 0x1"),
        "{line}"
    );
    // A route without a name says itself what is wrong.
    let bare = Route::new(None, || Err(LinkError::NoTransport));
    assert!(matches!(Session::first(vec![bare]), Err(SessionError::Link(LinkError::NoTransport))));
}

#[test]
fn a_command_that_was_not_carried_ends_the_session() {
    let (session, host) = open();
    // The handler's code counts from the transport's: this one answers 1.
    host.0.lock().unwrap().refused.insert(Command::DeviceGetType, 1u32.wrapping_sub(FORWARD_BASE));
    let error = session.device_get_type(&DeviceGetTypeRequest {}).unwrap_err();
    assert!(matches!(error, SessionError::Transport { command: Command::DeviceGetType, code: 1 }), "{error}");
    assert!(session.is_lost());
    assert!(matches!(session.device_get_count(&DeviceGetCountRequest {}), Err(SessionError::Lost(_))));
}

#[test]
fn a_host_that_falls_silent_is_lost_at_the_environments_deadline() {
    let (mut session, host) = open();
    session.deadline = Some(Duration::from_millis(30));
    session.device_get_count(&DeviceGetCountRequest {}).unwrap();
    host.0.lock().unwrap().silent = true;
    let error = session.device_get_count(&DeviceGetCountRequest {}).unwrap_err();
    assert!(matches!(error, SessionError::Lost(_)) && error.to_string().contains("30 ms"), "{error}");
    assert!(session.is_lost());
}

#[test]
fn t20_a_host_that_falls_silent_at_the_start_is_lost_without_a_deadline_of_the_environment_s() {
    let (link, host) = FakeLink::new();
    let mut session = Session::open(link).unwrap();
    host.0.lock().unwrap().silent = true;
    let limit = Duration::from_millis(30);
    let error = session.start_within(limit, |session| session.call(&DeviceGetCountRequest {})).unwrap_err();
    assert!(matches!(error, SessionError::Lost(_)) && error.to_string().contains("30 ms"), "{error}");
    // Afterwards a command may compute for as long as it likes.
    assert!(session.start_deadline.is_none());
}

/// A session that watches its host's word, and gives the host up after `limit` of silence.
fn watching(limit: Duration) -> (Session, Arc<Host>) {
    let (link, host) = FakeLink::new();
    host.0.lock().unwrap().features = u64::MAX;
    let mut session = Session::greet(link).unwrap();
    session.deadline = Some(limit);
    session.load_library().unwrap();
    session.extend().unwrap();
    assert_eq!(host.0.lock().unwrap().seen, [Command::Hello, Command::Liveness]);
    (session, host)
}

#[test]
fn t20_a_living_host_may_take_its_time_and_a_silent_one_may_not() {
    let limit = Duration::from_millis(300);
    let (session, host) = watching(limit);
    host.0.lock().unwrap().silent = true;
    let start = std::time::Instant::now();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| session.device_get_count(&DeviceGetCountRequest {}));
        for beat in 1..=100 {
            let script = host.0.lock().unwrap();
            script.blobs[&script.word.unwrap()].store_word(0, beat);
            drop(script);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!call.is_finished());
        let error = call.join().unwrap().unwrap_err();
        assert!(error.to_string().contains("no sign of life for 300 ms"), "{error}");
    });
    assert!(start.elapsed() >= 4 * limit);
    assert!(session.is_lost());
}

#[test]
fn t20_an_answer_that_comes_late_is_nobodys() {
    let (session, host) = watching(Duration::from_millis(20));
    host.0.lock().unwrap().silent = true;
    session.device_get_count(&DeviceGetCountRequest {}).unwrap_err();
    let mut script = host.0.lock().unwrap();
    script.silent = false;
    script.blobs[&1].store_word(0, FORWARD_BASE + 1);
    drop(script);
    let error = session.device_get_count(&DeviceGetCountRequest {}).unwrap_err();
    assert!(matches!(error, SessionError::Lost(_)), "{error}");
}

#[test]
fn t20_a_host_without_room_for_the_word_is_not_watched() {
    let (link, host) = FakeLink::new();
    host.0.lock().unwrap().features = u64::MAX;
    host.0.lock().unwrap().refuse_blobs = true;
    let session = Session::open(link).unwrap();
    assert!(session.liveness.is_none());
    session.device_get_count(&DeviceGetCountRequest {}).unwrap();
}

proptest::proptest! {
    #[test]
    fn t20_rubbish_in_the_reply_is_an_error_or_a_value(
        code in proptest::prop_oneof![proptest::strategy::Just(FORWARD_BASE), proptest::num::u32::ANY],
        page in proptest::collection::vec(proptest::num::u8::ANY, 0..600),
    ) {
        let (session, host) = open();
        host.0.lock().unwrap().rubbish = Some((code, page));
        let _ = session.device_get_count(&DeviceGetCountRequest {});
        let _ = session.device_get_name(&DeviceGetNameRequest {});
        let _ = session.properties();
        let _ = session.graph_compute(&[0; 8]);
        let mut out = [0; 9];
        let _ = session.get_tensor(BufferHandle(1), &TensorRecord::default(), 0, &mut out);
        let lost = session.is_lost();
        host.0.lock().unwrap().rubbish = None;
        proptest::prop_assert_eq!(session.device_get_count(&DeviceGetCountRequest {}).is_err(), lost);
    }
}

#[test]
fn the_environments_deadline_is_a_number_of_milliseconds() {
    let read = |setting: &str| deadline(Some(setting.into()));
    assert!(matches!(deadline(None), Ok(None)));
    assert!(matches!(read(""), Ok(None)));
    assert_eq!(read("1500").unwrap(), Some(Duration::from_millis(1500)));
    for bad in ["0", "-1", "1s", "1.5"] {
        let line = read(bad).unwrap_err().to_string();
        assert!(line.contains(&format!("APIR_TIMEOUT_MS={bad} ")), "{line}");
    }
    let line = deadline(Some(std::ffi::OsString::from_vec(vec![0xe9]))).unwrap_err().to_string();
    assert!(line.starts_with("APIR_TIMEOUT_MS="), "{line}");
}

#[test]
fn tensors_larger_than_the_data_blob_travel_in_pieces() {
    let (session, host) = open();
    let len = DATA_BLOB_SIZE as usize + 5;
    let request = BufferTypeAllocBufferRequest { buffer_type: BufferTypeHandle(0xb), size: len as u64 + 9 };
    let buffer = session.buffer_type_alloc_buffer(&request).unwrap().buffer;
    let sent: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    let record = TensorRecord { data: 4, buffer, ..TensorRecord::default() };
    session.set_tensor(buffer, &record, 3, &sent).unwrap();
    let mut got = vec![0; len];
    session.get_tensor(buffer, &record, 3, &mut got).unwrap();
    assert!(sent == got);
    assert_eq!(host.0.lock().unwrap().buffers[&buffer.0][7..7 + len], sent);
    let moved = session.statistics().bytes;
    assert!(moved > 2 * len as u64 && moved < 2 * len as u64 + 2000);
    session.set_tensor(buffer, &record, 0, &[]).unwrap();
}

#[test]
fn a_large_graph_travels_in_a_blob_of_its_own() {
    let (session, host) = open();
    let graph = vec![7; DATA_BLOB_SIZE as usize + 1];
    host.0.lock().unwrap().status = -2;
    assert_eq!(session.graph_compute(&graph).unwrap(), -2);
    assert!(host.0.lock().unwrap().graph == graph);
    assert_eq!(host.0.lock().unwrap().unreferenced, [3]);
    assert_eq!(session.graph_compute(&[1, 2, 3, 4]).unwrap(), -2);
    assert_eq!(host.0.lock().unwrap().graph, [1, 2, 3, 4]);
    assert_eq!(session.statistics().graph_computes, 2);
}

#[test]
fn eight_threads_get_their_own_replies() {
    let (session, _) = open();
    std::thread::scope(|scope| {
        for thread in 0..8u8 {
            let session = &session;
            scope.spawn(move || {
                let request = BufferTypeAllocBufferRequest { buffer_type: BufferTypeHandle(0xb), size: 64 };
                let buffer = session.buffer_type_alloc_buffer(&request).unwrap().buffer;
                let record = TensorRecord { buffer, ..TensorRecord::default() };
                for call in 0..250u64 {
                    let bytes = [thread, call as u8, !thread, 1];
                    session.set_tensor(buffer, &record, call % 60, &bytes).unwrap();
                    let mut got = [0; 4];
                    session.get_tensor(buffer, &record, call % 60, &mut got).unwrap();
                    assert_eq!(got, bytes);
                    assert_eq!(session.device_get_name(&DeviceGetNameRequest {}).unwrap().name, "Fake");
                    assert_eq!(session.device_get_type(&DeviceGetTypeRequest {}).unwrap().type_, 1);
                }
            });
        }
    });
    assert_eq!(session.statistics().calls, 3 + 8 * (1 + 4 * 250));
}
