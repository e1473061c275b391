"""Run files on conversations with sounds and films: what is trained is plain transformers' own."""

import base64
import json
import wave

import numpy as np
import pytest
import transformers
from PIL import Image
from transformers.video_utils import load_video

from tests.cli.cases import sets
from tests.cli.test_images import (
    TEXT,
    assert_named,
    assert_plain,
    labelled,
    picture,
    talk,
    tokenizer_of,
    write_model,
    write_run,
)
from tests.sweeps import few
from tests.unit.data_cases import write_jsonl

RATE = 800  # samples a second, of which the model hears one second
SOUND = "<|audio_bos|><|AUDIO|><|audio_eos|>"


def qwen2_audio():
    tokenizer = tokenizer_of(SOUND, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", kind="audio")
    hears = transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=RATE, hop_length=10, chunk_length=1, n_fft=40
    )
    processor = transformers.Qwen2AudioProcessor(
        hears, tokenizer, chat_template=tokenizer.chat_template
    )
    tower = transformers.Qwen2AudioEncoderConfig(
        num_mel_bins=8, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32, d_model=16,
        max_source_positions=40,
    )  # fmt: skip
    config = transformers.Qwen2AudioConfig(
        text_config=TEXT | {"model_type": "qwen2", "vocab_size": len(tokenizer)},
        audio_config=tower.to_dict(),
        audio_token_index=processor.audio_token_id,
    )
    return transformers.Qwen2AudioForConditionalGeneration(config), processor


def sound(folder, name, seed, samples, rate=RATE, channels=1):
    """A file of noise; returns its wave, as soundfile reads it."""
    noise = np.random.default_rng(seed).integers(-9000, 9000, (samples, channels), dtype=np.int16)
    with wave.open(str(folder / name), "wb") as file:
        file.setparams((channels, 2, rate, samples, "NONE", ""))
        file.writeframes(noise.tobytes())
    return noise.astype(np.float32).mean(1) / 2**15


def conversations(folder):
    """Rows in every notation of sounds, one without; beside each its question and waves."""
    waves = [sound(folder, f"{n}.wav", n, 300 + 90 * n, channels=1 + n % 2) for n in range(4)]
    data = base64.b64encode((folder / "3.wav").read_bytes()).decode()
    encoded = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    text, place = {"type": "text", "text": "the sea"}, {"type": "audio"}
    named = {"type": "audio_url", "audio_url": {"url": "0.wav"}}
    return [
        (talk([named, text], "calm"), [place, text], waves[:1]),
        (talk("<audio><audio>the sea", "sunny", audios=["1.wav", "2.wav"]), [place, place, text],
         waves[1:3]),
        (talk([encoded, text], "It is 42."), [place, text], waves[3:]),
        (talk("the sea", "Thanks!"), [text], []),
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """The folder of a model that hears, and a run file on sounds."""
    model = write_model(tmp_path / "model", qwen2_audio)
    file = write_run(tmp_path, model, "audio_tower", steps=3, batch_size=4)
    write_jsonl(tmp_path / "rows.jsonl", [row for row, *_ in conversations(tmp_path)])
    return model, file


@pytest.mark.parametrize("packing", few([False, True]))
def test_a_run_with_sounds_is_plain_training(megatrain, run, tmp_path, packing):
    model, file = run
    alone = {"data__packing": True, "training__batch_size": 1, "training__micro_batch_size": 1}
    megatrain.done("train", file, *sets(**alone if packing else {}))
    processor = transformers.AutoProcessor.from_pretrained(model)
    batches = []
    for row, question, waves in conversations(tmp_path):
        heard = {"audio": waves, "audio_kwargs": {"sampling_rate": RATE}} if waves else {}
        batches.append(labelled(processor, question, row["messages"][1]["content"], **heard))
    assert_plain(tmp_path / "run", model, batches, "audio_tower")


def cut_off(path):
    sound(path.parent, path.name, 1, 300)
    path.write_bytes(path.read_bytes()[:20])


WRONG = {
    "missing": (lambda path: None, "a.wav: cannot be read: No such file"),
    "broken": (cut_off, "a.wav: not a whole audio"),
    "at another rate": (lambda path: sound(path.parent, path.name, 1, 300, 1600),
                        "a.wav: 1600 Hz in 16 bits: write it in 800 Hz"),
    "too long": (lambda path: sound(path.parent, path.name, 1, 1200),
                 "a sound of 1.5 seconds, whose end the model does not hear: cut it"),
    "too short": (lambda path: sound(path.parent, path.name, 1, 9),
                  "a sound of 9 samples, of which the model's processor makes no token"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_sound_that_cannot_be_trained_on_is_named_in_one_line(megatrain, run, tmp_path, case):
    make, problem = WRONG[case]
    make(tmp_path / "a.wav")
    write_jsonl(tmp_path / "rows.jsonl", [talk("What is it?", "calm", audio="a.wav")])
    assert_named(megatrain("train", run[1]), f"rows.jsonl:1: .*{problem}")


def test_the_data_command_shows_sounds(megatrain, run):
    output = megatrain.done("data", run[1], "--rows", "4").output
    assert "audio 0.wav (300 samples): 7 tokens" in output
    assert "audio in the row (570 samples)" in output


def qwen2_5_vl():
    tokens = ("<|vision_start|>", "<|video_pad|>", "<|vision_end|>", "<|image_pad|>")
    tokenizer = tokenizer_of("".join(tokens[:3]), *tokens, kind="video")
    sizes = {"patch_size": 4, "min_pixels": 8 * 8, "max_pixels": 16 * 16}
    processor = transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in
           ("vision_start", "vision_end", "video_pad", "image_pad")}  # fmt: skip
    tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2}
    tower |= {"patch_size": 4, "out_hidden_size": TEXT["hidden_size"], "window_size": 16}
    config = transformers.Qwen2_5_VLConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
        vision_config=tower | {"fullatt_block_indexes": [1]},
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        video_token_id=ids["video_pad"],
        image_token_id=ids["image_pad"],
    )  # fmt: skip
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def frames(folder, number, count):
    """Files of frames in the folder of a film."""
    (folder / f"film{number}").mkdir(exist_ok=True)
    return [picture(folder, f"film{number}/{n}.png", 10 * number + n) for n in range(count)]


def address(path):
    return f"data:;base64,{base64.b64encode(path.read_bytes()).decode()}"


@pytest.mark.parametrize("packing", [False, True])
def test_a_run_with_films_is_plain_training(megatrain, tmp_path, packing):
    pytest.importorskip("torchvision", reason="processors of films need it")
    model = write_model(tmp_path / "model", qwen2_5_vl)
    files = [frames(tmp_path, number, 4 + 2 * number) for number in range(2)]
    encoded = [address(tmp_path / file) for file in files[1]]
    text, place = {"type": "text", "text": "the sea"}, {"type": "video"}
    talks = [
        (talk([{"type": "video", "video": files[0]}, text], "calm"), files[:1]),
        (talk("<video>the sea", "sunny and It is 42.", videos=[encoded]), files[1:]),  # as bytes
        (talk([text], "Thanks!"), []),
    ]
    keys = {"steps": 3, "batch_size": 3}
    keys |= {"batch_size": 1, "micro_batch_size": 1} if packing else {}
    file = write_run(tmp_path, model, "visual", **keys)
    write_jsonl(tmp_path / "rows.jsonl", [row for row, _ in talks])
    megatrain.done("train", file, *sets(data__packing=packing))
    processor = transformers.AutoProcessor.from_pretrained(model)
    batches = []
    for row, films in talks:
        seen = [np.stack([np.asarray(Image.open(tmp_path / f)) for f in film]) for film in films]
        question, reply = [*[place] * len(films), text], row["messages"][1]["content"]
        batches.append(labelled(processor, question, reply, videos=seen or None))
    assert_plain(tmp_path / "run", model, batches, "visual")


@pytest.mark.parametrize("sampled", [False, True])
def test_files_of_films_are_decoded_as_transformers_does(megatrain, tmp_path, sampled):
    """One in a file, one in the row: the frames the processor takes. A list of all beside."""
    pytest.importorskip("torchvision", reason="processors of films need it")
    av = pytest.importorskip("av", reason="a decoder of films")
    model = write_model(tmp_path / "model", qwen2_5_vl)
    config = model / "processor_config.json"
    settings = json.loads(config.read_text())
    settings["video_processor"] |= {"do_sample_frames": sampled, "fps": 5 if sampled else None}
    config.write_text(json.dumps(settings))
    for number in range(2):
        with av.open(str(tmp_path / f"{number}.mp4"), "w") as film:
            stream = film.add_stream("mpeg4", rate=10)
            stream.width = stream.height = 32
            for at in range(10 + 4 * number):
                pixels = np.full((32, 32, 3), 15 * at + 5 * number, np.uint8)
                film.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            film.mux(stream.encode())
    text, place = {"type": "text", "text": "the sea"}, {"type": "video"}
    still = frames(tmp_path, 2, 6)
    seen = np.stack([np.asarray(Image.open(tmp_path / file)) for file in still])
    talks = [
        (talk([{"type": "video", "video": "0.mp4"}, text], "calm"), str(tmp_path / "0.mp4")),
        (talk("<video>the sea", "sunny", videos=[{"bytes": address(tmp_path / "1.mp4")}]),
         str(tmp_path / "1.mp4")),
        (talk("<video>the sea", "It is 42.", videos=[still]), seen),
    ]  # fmt: skip
    talks[2] = talks[0] if sampled else talks[2]  # nobody knows the rate of frames alone
    file = write_run(tmp_path, model, "visual", steps=3, batch_size=3)
    write_jsonl(tmp_path / "rows.jsonl", [row for row, _ in talks])
    megatrain.done("train", file)
    shown = megatrain.done("data", file, "--rows", "2").output
    assert f"video 0.mp4 ({4 if sampled else 10} x 32 x 32)" in shown
    processor = transformers.AutoProcessor.from_pretrained(model)

    def fetch(films, sample_indices_fn=None):  # the processor's own takes torchcodec alone
        decoded = (
            load_video(f, backend="pyav", sample_indices_fn=sample_indices_fn) for f in films
        )
        return [*zip(*decoded, strict=True)]

    processor.video_processor.fetch_videos = fetch
    batches = [
        labelled(processor, [place, text], row["messages"][1]["content"], videos=[film])
        for row, film in talks
    ]
    assert_plain(tmp_path / "run", model, batches, "visual")


def test_without_a_decoder_a_line_says_what_to_install(megatrain, tmp_path, monkeypatch):
    pytest.importorskip("torchvision", reason="processors of films need it")
    monkeypatch.setattr("megatrain.data.images.decoder_of_films", lambda: None)
    (tmp_path / "a.mp4").write_bytes(b"a film")
    file = write_run(tmp_path, write_model(tmp_path / "model", qwen2_5_vl), "visual")
    write_jsonl(tmp_path / "rows.jsonl", [talk("<video>What is it?", "calm", videos=["a.mp4"])])
    assert_named(megatrain("train", file), "a.mp4: no decoder of films .* pip install torchcodec")
