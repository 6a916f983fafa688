use super::*;

fn header() -> Header {
    Header { size: 8 << 20, identity: Uuid::from_u128(7), generation: 9 }
}

fn extents() -> [(u64, Vec<u8>); 3] {
    [(4096, vec![1; 4096]), (1 << 20, vec![2; MAX_EXTENT]), (2 << 20, vec![3; 10])]
}

/// The parts of a stream.
fn parts() -> Vec<Vec<u8>> {
    let (mut encoder, first) = Encoder::start(&header());
    let mut parts = vec![first];
    parts.extend(extents().iter().map(|(offset, data)| encoder.extent(*offset, data)));
    parts.push(encoder.end());
    parts
}

fn decode(mut decoder: Decoder, bytes: &[u8], chunk: usize) -> Result<Vec<Frame>, StreamError> {
    let mut frames = Vec::new();
    for chunk in bytes.chunks(chunk) {
        decoder.push(chunk);
        while let Some(frame) = decoder.next_frame()? {
            frames.push(frame);
        }
    }
    decoder.finish()?;
    Ok(frames)
}

#[test]
fn a_stream_is_decoded_from_chunks_of_any_size() {
    let bytes = parts().concat();
    for chunk in [1000, 4096, bytes.len()] {
        let frames = decode(Decoder::default(), &bytes, chunk).unwrap();
        assert_eq!(frames[0], Frame::Header(header()));
        for (frame, (offset, data)) in frames[1..].iter().zip(extents()) {
            assert!(matches!(frame, Frame::Extent { offset: found, .. } if *found == offset));
            assert_eq!(frame.data(), data);
        }
        assert!(frames.len() == 5 && matches!(frames[4], Frame::End { .. }));
    }
}

#[test]
fn a_changed_byte_anywhere_is_found_and_the_error_names_its_part() {
    let parts = parts();
    let (bytes, mut start) = (parts.concat(), 0);
    for (index, part) in parts.iter().enumerate() {
        for at in [0, 5, 13, part.len() / 2, part.len() - 1] {
            let mut changed = bytes.clone();
            changed[start + at] ^= 1;
            match decode(Decoder::default(), &changed, 1 << 16).unwrap_err() {
                StreamError::Corrupt { at, .. } => assert_eq!(at, start as u64),
                StreamError::Truncated { .. } => assert!(index > 0 && at == 13),
                StreamError::NotAStream | StreamError::Version(_) => assert_eq!(index, 0),
                StreamError::TrailingBytes { at } => panic!("{at}"),
            }
        }
        start += part.len();
    }
}

#[test]
fn a_stream_without_its_end_is_truncated_and_more_bytes_are_refused() {
    let bytes = parts().concat();
    for length in [0, 10, 100, bytes.len() - 48, bytes.len() - 1] {
        let refused = decode(Decoder::default(), &bytes[..length], 1 << 16).unwrap_err();
        assert_eq!(refused, StreamError::Truncated { at: length as u64 });
    }
    let more = [&bytes[..], b"x"].concat();
    let refused = decode(Decoder::default(), &more, more.len()).unwrap_err();
    assert_eq!(refused, StreamError::TrailingBytes { at: bytes.len() as u64 });
}

#[test]
fn missing_repeated_and_reordered_extents_are_refused() {
    let parts = parts();
    for order in [vec![0, 1, 3, 4], vec![0, 1, 1, 2, 3, 4], vec![0, 2, 1, 3, 4], vec![0, 4]] {
        let bytes: Vec<u8> = order.iter().flat_map(|index| parts[*index].clone()).collect();
        let refused = decode(Decoder::default(), &bytes, bytes.len()).unwrap_err();
        assert!(matches!(refused, StreamError::Corrupt { .. }), "{order:?}: {refused}");
    }
}

#[test]
fn a_resumed_stream_continues_with_the_same_bytes() {
    let parts = parts();
    let mut decoder = Decoder::default();
    decoder.push(&parts[..3].concat());
    while decoder.next_frame().unwrap().is_some() {}
    let after = decoder.position();
    assert_eq!((after.offset, decoder.verified()), (2 << 20, parts[..3].concat().len() as u64));
    let (mut encoder, first) = Encoder::resume(&header(), after);
    let (offset, data) = &extents()[2];
    let rest = [encoder.extent(*offset, data), encoder.end()].concat();
    assert_eq!((first.clone(), rest.clone()), (parts[0].clone(), parts[3..].concat()));
    let frames = decode(Decoder::resume(after), &[first, rest].concat(), 1 << 16).unwrap();
    assert_eq!(frames.len(), 3);
}

#[test]
fn a_checksum_round_trips_as_text() {
    let checksum = header().checksum();
    assert_eq!(checksum.to_string().parse(), Ok(checksum));
    for bad in ["", "00", &"+1".repeat(32), &"é".repeat(32), &"A0".repeat(32)] {
        assert!(bad.parse::<Checksum>().is_err(), "{bad}");
    }
}
