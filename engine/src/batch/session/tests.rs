use std::path::Path;
use std::sync::OnceLock;

use pilotlight_domain::{ModelName, SessionId};
use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits { vocabulary: 2048, context: 512, kv_tokens: 512 };

fn demo() -> &'static ModelText {
    static DEMO: OnceLock<ModelText> = OnceLock::new();
    DEMO.get_or_init(|| {
        ModelText::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")).unwrap()
    })
}

fn prepared(prompt: Vec<TokenId>, generated: Vec<TokenId>, sampling: Sampling) -> Prepared {
    let spec = SessionSpec {
        id: serde_json::from_str::<SessionId>("\"r1\"").unwrap(),
        model: serde_json::from_str::<ModelName>(r#"{"namespace":"default","name":"demo"}"#).unwrap(),
        epoch: 0,
        input: Input::Text("gone".into()),
        generated,
        sampling,
        hold: false,
        on_cpu: false,
    };
    Prepared::new(SessionKey(1), spec, prompt)
}

fn refusal(prompt: Vec<TokenId>, sampling: Sampling, limits: Limits) -> Refusal {
    Session::begin(prepared(prompt, Vec::new(), sampling), demo(), &limits).unwrap_err()
}

#[test]
fn what_cannot_be_served_is_refused_with_its_numbers() {
    let none = Sampling::default();
    let refused = refusal(vec![], none.clone(), LIMITS);
    assert_eq!(refused.code, FailureCode::BadRequest);
    let refused = refusal(vec![2048], none.clone(), LIMITS);
    assert_eq!(
        refused,
        Refusal::bad_request("token id 2048 in the prompt is outside the vocabulary of 2048 tokens")
    );
    let refused = refusal(vec![5; 512], none.clone(), LIMITS);
    assert_eq!(refused.code, FailureCode::ContextLengthExceeded);
    assert!(refused.message.contains("512 tokens; the context is 512 tokens,"), "{}", refused.message);
    let refused = refusal(vec![5; 100], none, Limits { kv_tokens: 48, ..LIMITS });
    assert!(
        refused.message.contains("100 tokens; the context is 49 tokens (KV memory bounds it"),
        "{}",
        refused.message
    );
    let bias = Sampling { logit_bias: [(9999, 1.0)].into(), ..Sampling::default() };
    assert!(refusal(vec![5], bias, LIMITS).message.contains("token id 9999 in `logit_bias`"));
    let stops = Sampling { stop: vec!["x".into(); 65], ..Sampling::default() };
    assert!(refusal(vec![5], stops, LIMITS).message.contains("`stop` takes at most 64"));
}

#[test]
fn sessions_end_where_they_must() {
    let text = demo();
    let ids = text.tokenizer().unwrap().encode("good morrow, gentle lady", false).unwrap();
    let run = |sampling: Sampling, ids: &[TokenId]| {
        let (mut session, ended) =
            Session::begin(prepared(vec![0], vec![], sampling), text, &LIMITS).unwrap();
        assert_eq!(ended, None);
        let mut said = String::new();
        for id in ids {
            let token = session.push(*id, text);
            said.push_str(&token.text);
            if token.end.is_some() {
                return (said, token.end, session.usage().completion_tokens as usize);
            }
        }
        (said, None, ids.len())
    };
    let with_end = [ids.as_slice(), &[1]].concat();
    let all = ids.len();
    assert_eq!(
        run(Sampling::default(), &with_end),
        ("good morrow, gentle lady".into(), Some(FinishReason::Stop), all + 1)
    );
    // The end-of-text token is never in the text, also where it does not end it.
    let on = Sampling { ignore_eos: true, ..Sampling::default() };
    assert_eq!(run(on, &with_end), ("good morrow, gentle lady".into(), None, all + 1));
    // What looked like the beginning of a stop string is said with the last token.
    let held =
        Sampling { stop: vec!["ladybird".into()], max_tokens: Some(all as u32), ..Sampling::default() };
    assert_eq!(run(held, &ids), ("good morrow, gentle lady".into(), Some(FinishReason::Length), all));
    let stop = Sampling { stop: vec!["row, ge".into()], ..Sampling::default() };
    let (said, end, _) = run(stop, &ids);
    assert_eq!((said.as_str(), end), ("good mor", Some(FinishReason::Stop)));
    let (session, ended) = Session::begin(
        prepared(vec![0], vec![], Sampling { max_tokens: Some(0), ..Sampling::default() }),
        text,
        &LIMITS,
    )
    .unwrap();
    assert_eq!((ended, session.usage().completion_tokens), (Some(FinishReason::Length), 0));
}

#[test]
fn the_context_ends_an_answer() {
    let text = demo();
    let limits = Limits { context: 4, ..LIMITS };
    let (mut session, _) =
        Session::begin(prepared(vec![5, 6], vec![], Sampling::default()), text, &limits).unwrap();
    assert_eq!((session.push(7, text).end, session.remaining()), (None, 1));
    assert_eq!(session.push(8, text).end, Some(FinishReason::Length));
    // Where memory is what bounds it, a session that outgrew it elsewhere is not cut short here.
    let limits = Limits { kv_tokens: 3, ..LIMITS };
    let refused =
        Session::begin(prepared(vec![5, 6], vec![7, 8, 9], Sampling::default()), text, &limits).unwrap_err();
    assert_eq!((refused.code, refused.retry), (FailureCode::NoCapacity, Retry::Elsewhere));
}

proptest! {
    #[test]
    fn a_replayed_session_says_what_the_undisturbed_one_says(
        ids in proptest::collection::vec(prop_oneof![4 => 3_u32..1024, 1 => 3_u32..260, 1 => Just(1_u32)], 1..40),
        cut in 0_usize..40,
        stop in proptest::collection::vec("[a-z ]{1,2}", 0..2),
        max in 1_u32..50,
    ) {
        let text = demo();
        let sampling = Sampling { stop, max_tokens: Some(max), ..Sampling::default() };
        let (mut whole, _) = Session::begin(prepared(vec![0], vec![], sampling.clone()), text, &LIMITS).unwrap();
        let mut said = Vec::new();
        for id in &ids {
            said.push(whole.push(*id, text));
            if said.last().unwrap().end.is_some() { break; }
        }
        let ids = &ids[..said.len()];
        let cut = cut % (ids.len() + 1);
        let (mut moved, ended) = Session::begin(prepared(vec![0], ids[..cut].to_vec(), sampling), text, &LIMITS).unwrap();
        prop_assert_eq!(ended, said[..cut].last().and_then(|token| token.end));
        if ended.is_none() {
            for (id, expect) in ids[cut..].iter().zip(&said[cut..]) {
                prop_assert_eq!(&moved.push(*id, text), expect);
            }
        }
    }
}
