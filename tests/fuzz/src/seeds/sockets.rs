//! Frames, and streams of them.
#![forbid(unsafe_code)]

use super::Seeds;
use crate::input::Input as _;
use crate::socket::{Input, Packet, Plugin};
use apir_protocol::socket::{BlobRefusal, ClientFrame, ServerFrame};

fn submit(type_: u8, flags: u32, words: &[u32]) -> Packet {
    Packet::Submit { type_, flags, venus: false, reply: 1, words: words.to_vec() }
}

/// The inputs by name.
pub(super) fn all() -> Seeds {
    let mut seeds = Seeds::new();
    let mut add = |name: &str, input: Input| {
        seeds.insert(name.to_owned(), input.store());
    };
    for (name, frame) in [
        ("hello", ClientFrame::hello()),
        ("create_blob", ClientFrame::create_blob(1 << 40 | 5)),
        ("unref", ClientFrame::unref(9)),
        ("attach", ClientFrame::attach(7, 1 << 33 | 3)),
    ] {
        let packet = frame.as_bytes().to_vec();
        add(&format!("s19_client_{name}_cut"), Input::Client(packet[..packet.len() - 1].to_vec()));
        add(&format!("client_{name}"), Input::Client(packet));
    }
    add("client_submit", Input::Client(submit(2, 1, &[7]).bytes()));
    for (name, frame) in [
        ("hello", ServerFrame::Hello { version: 1 }),
        ("blob", ServerFrame::Blob { res_id: 1, size: 4096 }),
        ("refused", ServerFrame::BlobRefused { code: BlobRefusal::Size }),
    ] {
        add(&format!("server_{name}"), Input::Server(frame.to_frame().as_bytes().to_vec()));
    }
    let page = Packet::CreateBlob(16_384);
    let handshake = || submit(0, 0, &[0, 2]);
    let load = || submit(1, 0, &[]);
    let name = || submit(2, 2, &[]);
    for (what, plugin) in [
        ("none", Plugin::None),
        ("missing", Plugin::Missing),
        ("other", Plugin::Other),
        ("real", Plugin::Real),
    ] {
        let packets = vec![page.clone(), handshake(), load(), name(), load(), name()];
        add(&format!("stream_{what}"), Input::Stream(plugin, packets));
    }
    let venus = Packet::Submit { type_: 0, flags: 0, venus: true, reply: 1, words: vec![0, 2] };
    add("stream_venus", Input::Stream(Plugin::None, vec![page.clone(), venus]));
    let real = |packets: &[Packet]| {
        Input::Stream(Plugin::Real, [&[page.clone(), handshake(), load()], packets].concat())
    };
    add("s20_before_load", Input::Stream(Plugin::Real, vec![page.clone(), name()]));
    add("s20_unknown", real(&[submit(2, 23, &[]), submit(2, u32::MAX, &[1, 2, 3]), name()]));
    add("s20_type", real(&[submit(3, 0, &[])]));
    add(
        "s18_reply_of_nothing",
        real(&[Packet::Submit { type_: 2, flags: 2, venus: false, reply: 9, words: vec![] }]),
    );
    add("s18_reply_given_back", real(&[Packet::Unref(1), name()]));
    // Command 18 with a resource that there is none of.
    add("s18_unknown_blob", real(&[submit(2, 9, &[77, 4096, 0, 4096, 0]), name()]));
    let small = Packet::CreateBlob(1);
    add("s18_small_reply", Input::Stream(Plugin::None, vec![small, handshake()]));
    add("s19_header_cut", Input::Stream(Plugin::None, vec![page, Packet::Raw(vec![4, 0, 0, 0, 2, 0, 0, 0])]));
    seeds
}
