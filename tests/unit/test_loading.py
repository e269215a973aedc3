"""Loading: precision, adapters, dropout, and a tokenizer that fits the model."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    SeedOssConfig,
    XGLMConfig,
)

from colocate.policy.model.loading import (
    add_adapter,
    check_vocabulary,
    load_model,
    set_pad_token,
    stop_token_ids,
)
from colocate.policy.model.precision import cast_to_bf16
from colocate.policy.model.training_mode import disable_dropout

CONFIG = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)


def make_model(**kwargs):
    return AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG, **kwargs))


def make_tokenizer(size: int, **special) -> PreTrainedTokenizerFast:
    vocabulary = {f"t{i}": i for i in range(size)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), **special
    )


def test_load_by_path_and_dtype(tmp_path):
    make_model().to(torch.bfloat16).save_pretrained(tmp_path)
    path = str(tmp_path)
    assert load_model(path, bf16=False).dtype == torch.float32
    assert load_model(path, bf16=True).dtype == torch.bfloat16
    assert load_model(path, bf16=False, model_init_kwargs={"dtype": "float16"}).dtype == torch.float16
    with pytest.raises(ValueError, match="bfloat17"):
        load_model(path, bf16=True, model_init_kwargs={"dtype": "bfloat17"})


def test_load_takes_objects():
    model = make_model()
    assert load_model(model, bf16=True) is model
    with pytest.raises(ValueError, match="model_init_kwargs"):
        load_model(model, bf16=True, model_init_kwargs={"dtype": "float32"})
    with pytest.raises(TypeError, match="LlamaModel is not a causal language model"):
        load_model(AutoModel.from_config(LlamaConfig(**CONFIG)), bf16=True)


def test_cast_keeps_the_exact_weights_and_the_fp32_buffers():
    model = make_model(tie_word_embeddings=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    originals = cast_to_bf16(model)
    assert originals.keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(originals[name], before[name])
        assert torch.equal(parameter, before[name].to(torch.bfloat16))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(b.dtype == torch.float32 for b in model.buffers() if b.is_floating_point())


def test_adapters_stay_fp32_over_a_bf16_model():
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = make_model()
    cast_to_bf16(model)
    new = add_adapter(model, config)
    old = get_peft_model(make_model(), config)
    originals = cast_to_bf16(old)
    assert all("modules_to_save" in name for name in originals) and originals
    for wrapped in (new, old):
        for name, parameter in wrapped.named_parameters():
            assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name


def test_adapter_errors():
    model = make_model()
    with pytest.raises(TypeError, match="dict"):
        add_adapter(model, {"r": 8})
    with pytest.raises(ValueError, match="virtual tokens"):
        add_adapter(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    wrapped = add_adapter(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="merge_and_unload"):
        add_adapter(wrapped, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**CONFIG, attention_dropout=0.5),
        SeedOssConfig(
            **CONFIG, num_key_value_heads=2, head_dim=8, residual_dropout=0.5, attention_dropout=0.0
        ),
        XGLMConfig(vocab_size=32, d_model=16, ffn_dim=24, num_layers=1, attention_heads=2, dropout=0.5),
        GPT2Config(
            vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, embd_pdrop=0.5, attn_pdrop=0.5
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_no_dropout_is_left(config):
    model = AutoModelForCausalLM.from_config(config).train()
    ids = torch.arange(8)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_vocabulary_must_fit():
    check_vocabulary(make_tokenizer(20), make_model())
    check_vocabulary(make_tokenizer(32), make_model())
    with pytest.raises(ValueError, match=r"largest token id is 32, .* 0 to 31 \(32 rows\)"):
        check_vocabulary(make_tokenizer(33), make_model())


def test_pad_and_stop_tokens(caplog):
    model, tokenizer = make_model(), make_tokenizer(32, eos_token="t5")
    model.generation_config.eos_token_id = [7, 5]
    assert set_pad_token(tokenizer, model) == 5
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id == 5
    assert stop_token_ids(tokenizer, model) == (5, 7)
    model.generation_config.eos_token_id = 5
    assert stop_token_ids(tokenizer, model) == (5,)
    assert "aligned with the tokenizer" not in caplog.text  # the model had none
    assert set_pad_token(make_tokenizer(32, eos_token="t5", pad_token="t9"), model) == 9
    assert "PAD token 9 differs from the model config and generation config (5)" in caplog.text
    with pytest.raises(ValueError, match="eos_token"):
        set_pad_token(make_tokenizer(32), model)
